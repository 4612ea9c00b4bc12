"""Say where an error sits: positions, heads, channels, experts, as far as the operator shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from layerbisect.kernels.judging.own_error import EXCESS_RATIO, MEDIAN_RATIO, OwnError

_ALL = 0.9
_AGREEMENT = 0.9
_FEW = 4
_PARTS = ("head ", "channel ", "expert ")

Named = tuple[str, torch.Tensor]


def describe(
    error: OwnError, position: torch.Tensor, named: Callable[[torch.Tensor], Iterable[Named]]
) -> str:
    """Describe where the rows in excess are, and in which heads; a fitted part where none is.

    ``position`` int64 [row] is that of each row of the error. ``named`` is given which rows are in
    excess (bool [row]) and returns sets of rows that have a name (bool [row]); of those the one
    that agrees best with the excess is told, the first of equals.
    """
    parts = [f.name.rsplit(" ", 1)[0] for f in error.fits if f.name.startswith(_PARTS)]
    of_a_part = bool(parts) and error.fits[0].name.startswith(_PARTS)
    if not error.far_off:
        # what explains most is of the whole output: its parts are only where it shows most
        return ", ".join(dict.fromkeys(parts)) if of_a_part else "all rows"
    hit = error.row_ratio > EXCESS_RATIO
    heads, (rows, told) = _heads(error), _rows(hit, position, named)
    if of_a_part and not heads and not told:
        # rows in which that part is large
        return ", ".join(dict.fromkeys(parts))
    return ", ".join(place for place in (heads, rows) if place) or "all rows"


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


def by_position(position: torch.Tensor, hit: torch.Tensor) -> Iterator[Named]:
    """Name the rows from the first position in excess on, up to the last one, and in between."""
    first, last = int(position[hit].min()), int(position[hit].max())
    yield f"positions >= {first}", position >= first
    yield f"positions <= {last}", position <= last
    between = (position >= first) & (position <= last)
    yield f"position {first}" if first == last else f"positions {first} to {last}", between


def by_expert(ids: torch.Tensor, hit: torch.Tensor) -> Iterator[Named]:
    """Name the rows routed to the experts (``ids`` [row, slot]) whose rows are most in excess."""
    guilty: list[int] = []
    mask = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    shares = {
        e: float(hit[(ids == e).any(1)].double().mean()) for e in ids.unique().tolist() if e >= 0
    }
    for expert in sorted(shares, key=lambda e: -shares[e])[:4]:
        guilty.append(int(expert))
        mask = mask | (ids == expert).any(1)
        names = ", ".join(map(str, sorted(guilty)))
        yield f"tokens routed to expert {names}", mask.clone()


def _heads(error: OwnError) -> str:
    """Name the heads that err where only some do."""
    guilty = heads_in_error(error)
    if not guilty:
        return ""
    if len(guilty) == 1:
        return f"head {guilty[0]}"
    in_a_row = len(guilty) > 2 and guilty[-1] - guilty[0] == len(guilty) - 1
    return "heads " + (f"{guilty[0]} to {guilty[-1]}" if in_a_row else ", ".join(map(str, guilty)))


def _rows(
    hit: torch.Tensor,
    position: torch.Tensor,
    named: Callable[[torch.Tensor], Iterable[Named]],
) -> tuple[str, bool]:
    """Describe the rows in excess where not all are, and say whether more than their number."""
    count = int(hit.sum())
    if not count or count > _ALL * len(hit):
        return "", False
    best, sentence = 0.0, f"{count / len(hit):.0%} of rows"
    if count <= _FEW:
        at = sorted(set(position[hit].tolist()))
        places = ("position " if len(at) == 1 else "positions ") + ", ".join(map(str, at))
        sentence = ("1 row" if count == 1 else f"{count} rows") + f", at {places}"
    for name, mask in named(hit):
        both = (hit & mask).sum().item()
        # harmonic mean of how many hits it covers and how many of its rows are hits
        agreement = 2 * both / max(count + int(mask.sum()), 1)
        if agreement > max(best, _AGREEMENT):
            best, sentence = agreement, name
    return sentence, best > 0 or count <= _FEW
