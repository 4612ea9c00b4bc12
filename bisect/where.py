"""Say where an error sits: positions, decode rows, tokens of an expert, a head, a channel."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layerbisect.bisect.measure import EXCESS_RATIO, OwnError
from layerbisect.bisect.side import Side

_ALL = 0.9
_AGREEMENT = 0.9


def describe(error: OwnError, side: Side) -> str:
    """Describe where the rows in excess are; a fitted head or channel where the size is normal."""
    if not error.far_off:
        named = [f.name.removesuffix(" gain") for f in error.fits]
        return ", ".join(n for n in named if n.startswith(("head", "channel"))) or "all rows"
    hit = error.row_ratio > EXCESS_RATIO
    if not hit.any() or hit.double().mean() > _ALL:
        return "all rows"
    best, sentence = 0.0, f"{hit.double().mean():.0%} of rows"
    for name, mask in _candidates(error, side):
        both = (hit & mask).sum().item()
        # harmonic mean of how many hits it covers and how many of its rows are hits
        agreement = 2 * both / max(int(hit.sum()) + int(mask.sum()), 1)
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
    first, last = int(position[hit].min()), int(position[hit].max())
    yield f"positions >= {first}", position >= first
    yield f"positions <= {last}", position <= last
    yield f"positions {first} to {last}", (position >= first) & (position <= last)
    if error.operator in ("experts", "router") and error.layer is not None:
        ids = side.read(f"layers.{error.layer}.mlp.expert_ids")
        if ids is not None:
            yield from _by_expert(ids[rows], hit)


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
