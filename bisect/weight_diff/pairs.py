"""Two holders' values of one tensor, with the previous ones, as the tests of faults take them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from layerbisect.bisect.weight_diff.digests import compare_digests, has_values, stored_alike
from layerbisect.bisect.weight_diff.holders import Held, Holder
from layerbisect.bisect.weight_diff.numbers import distance, equal, equal_but_for_dtype, unit
from layerbisect.captures.errors import LayerBisectError

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
"""How the names of what has a row for each token of the vocabulary end."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor of both sides in float32, dequantised, and of the previous holder if it has it.

    ``held`` is None where one side holds digests alone: the values are then samples [k].
    ``stale`` is the place (0, 1) of the side that alone equals the previous holder. ``apart`` is
    the relative distance of the sides, NaN where their shapes differ.
    """

    name: str
    first: torch.Tensor
    second: torch.Tensor
    previous: torch.Tensor | None
    held: tuple[Held, Held] | None
    stale: int | None
    apart: float

    @property
    def unit(self) -> float:
        """What rounding to the narrower dtype makes of that."""
        if self.held is None:
            return 2.0**-9
        return unit(*(held.values for held in self.held))

    def nearer_previous(self) -> int | None:
        """Which side (0, 1) the previous weights are much nearer to; None where neither."""
        if self.previous is None or self.previous.shape != self.first.shape:
            return None
        gaps = [distance(side, self.previous) for side in (self.first, self.second)]
        if not all(gap == gap for gap in gaps):
            return next((i for i, gap in enumerate(gaps) if gap == gap), None)
        near = 0 if gaps[0] < gaps[1] else 1
        return near if gaps[near] < 0.3 * gaps[1 - near] else None

    def off(self) -> int | None:
        """The side (0, 1) that the previous weights are not near to, where one is broken."""
        near = self.nearer_previous()
        if near is None:
            near = self.stale
        return None if near is None else 1 - near


def load_pair(name: str, first: Holder, second: Holder, previous: Holder | None) -> Pair:
    """Read a tensor that differs; raises LayerBisectError where a side cannot be read."""
    known = previous is not None and name in previous
    if not has_values(first) or not has_values(second):
        look = compare_digests(name, first, second)
        assert look.samples is not None
        stale = _stale_digests(name, (first, second), previous) if known and previous else None
        return Pair(name, *look.samples, None, None, stale, distance(*look.samples))
    held = first.get(name), second.get(name)
    narrow = _narrower(held)
    a, b = (_rounded(one, narrow) for one in held)
    if name.endswith((EMBED, HEAD)) and a.shape[1:] == b.shape[1:]:
        # a padded vocabulary
        rows = min(len(a), len(b))
        a, b = a[:rows], b[:rows]
    before = None
    stale = None
    if known and previous is not None and has_values(previous):
        old = previous.get(name)
        before = _rounded(old, narrow)
        if before.ndim == a.ndim and before.shape[1:] == a.shape[1:]:
            before = before[: len(a)]
        if before.shape != a.shape:
            before = None
        else:
            same = [_same(one, old, len(a)) for one in held]
            stale = same.index(True) if sum(same) == 1 else None
    elif known and previous is not None:
        stale = _stale_digests(name, (first, second), previous)
    apart = distance(a, b) if a.shape == b.shape else math.nan
    return Pair(name, a, b, before, held, stale, apart)


def unread_rows(holders: tuple[Holder, Holder], held: tuple[Held, Held]) -> str | None:
    """Say which rows one side alone has of a vocabulary, where they are no padding.

    Padding is one constant: what differs from row to row is of tokens. None where no rows are, or
    where they may pad.
    """
    rows = min(len(one.values) for one in held)
    for holder, one in zip(holders, held, strict=True):
        more = one.values[rows:].float()
        if len(more) and not bool((more == more.flatten()[0]).all()):
            return (
                f"rows {rows:,} to {len(one.values) - 1:,} of {holder.label} have no counterpart, "
                "and are not constant, as padding is; save the snapshot again with as many rows as "
                "the checkpoint has (vocab)"
            )
    return None


def _narrower(held: tuple[Held, Held]) -> torch.dtype | None:
    """The dtype that one side was cast to on loading; None where they are alike or quantised."""
    if any(one.scale is not None for one in held):
        return None
    first, second = (one.values.dtype for one in held)
    if first.itemsize == second.itemsize:
        return None
    return first if first.itemsize < second.itemsize else second


def _rounded(held: Held, narrow: torch.dtype | None) -> torch.Tensor:
    """Values in float32, rounded as the narrower side's: a cast alone is no difference."""
    if narrow is None or held.scale is not None or held.values.itemsize <= narrow.itemsize:
        return held.numbers()
    return held.values.to(narrow).float()


def _same(held: Held, old: Held, rows: int) -> bool:
    if (held.scale is None) != (old.scale is None):
        return False
    if held.scale is not None and old.scale is not None and not equal(held.scale, old.scale):
        return False
    a, b = held.values[:rows], old.values[:rows]
    return equal(a, b) if a.dtype == b.dtype else equal_but_for_dtype(a, b)


def _stale_digests(name: str, sides: tuple[Holder, Holder], previous: Holder) -> int | None:
    try:
        same = [_is_previous(name, side, previous) for side in sides]
    except LayerBisectError:
        return None
    return same.index(True) if sum(same) == 1 else None


def _is_previous(name: str, side: Holder, previous: Holder) -> bool:
    if stored_alike(name, side, previous):
        return True
    if has_values(side) and has_values(previous):
        held = side.get(name)
        return _same(held, previous.get(name), len(held.values))
    return compare_digests(name, side, previous).state != "different"
