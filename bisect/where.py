"""Say where an error sits: positions, sequences, decode rows, experts, heads, channels."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layerbisect.bisect.side import Side
from layerbisect.kernels.judging.own_error import EXCESS_RATIO, MEDIAN_RATIO, OwnError

_ALL = 0.9
_AGREEMENT = 0.9
_FEW = 4
_MOST = 0.5
_PARTS = ("head ", "channel ", "expert ")


def describe(error: OwnError, side: Side) -> str:
    """Describe where the rows in excess are, and in which heads; a fitted part where none is."""
    if not error.far_off:
        parts = [f.name.rsplit(" ", 1)[0] for f in error.fits if f.name.startswith(_PARTS)]
        return ", ".join(dict.fromkeys(parts)) or "all rows"
    hit = error.row_ratio > EXCESS_RATIO
    places = [p for p in (_heads(error), _rows(error, hit, side)) if p]
    return ", ".join(places) or "all rows"


def heads_in_error(error: OwnError) -> list[int]:
    """Number the heads that err where only some do; empty where all do, or there are none."""
    sample = error.sample
    # slots are no heads: which expert is in one differs from row to row
    if sample is None or sample.error.shape[1] == 1 or ".mlp.expert_" in error.point:
        return []
    by_head = (sample.error / sample.noise).square().mean(2).sqrt()
    hit = by_head.amax(1) > EXCESS_RATIO
    ratio = (by_head[hit] if bool(hit.any()) else by_head).median(0).values
    guilty: list[int] = torch.nonzero(ratio > MEDIAN_RATIO).flatten().tolist()
    return guilty if len(guilty) < len(ratio) else []


def _heads(error: OwnError) -> str:
    """Name the heads that err where only some do."""
    guilty = heads_in_error(error)
    if not guilty:
        return ""
    if len(guilty) == 1:
        return f"head {guilty[0]}"
    in_a_row = len(guilty) > 2 and guilty[-1] - guilty[0] == len(guilty) - 1
    return "heads " + (f"{guilty[0]} to {guilty[-1]}" if in_a_row else ", ".join(map(str, guilty)))


def _rows(error: OwnError, hit: torch.Tensor, side: Side) -> str:
    """Describe the rows in excess where not all are."""
    count = int(hit.sum())
    if not count or count > _ALL * len(hit):
        return ""
    best, sentence = 0.0, f"{count / len(hit):.0%} of rows"
    if count <= _FEW:
        at = sorted(set(side.chains.position[error.flat_rows[hit].numpy()].tolist()))
        places = ("position " if len(at) == 1 else "positions ") + ", ".join(map(str, at))
        sentence = ("1 row" if count == 1 else f"{count} rows") + f", at {places}"
    for name, mask in _candidates(error, side):
        both = (hit & mask).sum().item()
        # harmonic mean of how many hits it covers and how many of its rows are hits
        agreement = 2 * both / max(count + int(mask.sum()), 1)
        if agreement > max(best, _AGREEMENT):
            best, sentence = agreement, name
    return sentence


def _candidates(error: OwnError, side: Side) -> Iterator[tuple[str, torch.Tensor]]:
    rows = error.flat_rows
    position = torch.from_numpy(side.chains.position)[rows]
    hit = error.row_ratio > EXCESS_RATIO
    phases = side.capture.phases[side.index][rows.numpy()]
    for phase in sorted(set(phases.tolist())):
        yield f"{phase} rows", torch.from_numpy(phases == phase)
    if int(hit.sum()) > _FEW:
        yield from _by_sequence(side, rows, hit)
    first, last = int(position[hit].min()), int(position[hit].max())
    yield f"positions >= {first}", position >= first
    yield f"positions <= {last}", position <= last
    between = (position >= first) & (position <= last)
    yield f"position {first}" if first == last else f"positions {first} to {last}", between
    if error.operator in ("experts", "router") and error.layer is not None:
        ids = side.read(f"layers.{error.layer}.mlp.expert_ids")
        if ids is not None:
            yield from _by_expert(ids[rows], hit)


def _by_sequence(
    side: Side, rows: torch.Tensor, hit: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name the sequences of which most rows are hit; by their common prefix where they share it."""
    numbers = torch.from_numpy(side.capture.rows.sequence[side.index[rows.numpy()]]).long()
    present = numbers.unique().tolist()
    guilty = [n for n in present if float(hit[numbers == n].double().mean()) > _MOST]
    if not 0 < len(guilty) < len(present):
        return
    names = [side.capture.sequences[n].name for n in guilty]
    # a data-parallel rank's sequences begin with its name
    prefixes = {name.partition(".")[0] + "." for name in names if "." in name}
    others = [side.capture.sequences[n].name for n in present if n not in guilty]
    told = ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if names[_FEW:] else "")
    if names[1:] and len(prefixes) == 1 and all("." in name for name in names):
        (prefix,) = prefixes
        told = told if any(name.startswith(prefix) for name in others) else f"{prefix}*"
    one = len(names) == 1
    yield f"sequence{'' if one else 's'} {told}", torch.isin(numbers, torch.tensor(guilty))


def _by_expert(ids: torch.Tensor, hit: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    guilty: list[int] = []
    mask = torch.zeros(len(ids), dtype=torch.bool)
    shares = {
        e: float(hit[(ids == e).any(1)].double().mean()) for e in ids.unique().tolist() if e >= 0
    }
    for expert in sorted(shares, key=lambda e: -shares[e])[:4]:
        guilty.append(int(expert))
        mask = mask | (ids == expert).any(1)
        names = ", ".join(map(str, sorted(guilty)))
        yield f"tokens routed to expert {names}", mask.clone()
