"""Where in a tensor two holders differ: in one tensor-parallel slice, or in some rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerbisect.bisect.weight_diff.holders import Holder
from layerbisect.bisect.weight_diff.numbers import equal, garbage
from layerbisect.bisect.weight_diff.pairs import Pair
from layerbisect.bisect.weight_diff.report import ranges
from layerbisect.captures.weights.format import Extent

_SHARDS = (8, 4, 2)
# of a slice's lines so many must differ for it to be the slice that is off
_FULL = 0.9
# and of rows, so many of the values
_DENSE = 0.5
# so many values that differ are looked at one by one
_FEW = 16
# relative to the value or the usual one: several steps of bf16
_SMALL = 0.05


@dataclass(frozen=True, slots=True)
class Region:
    """Lines ``[start, stop)`` of dimension ``dim`` that hold all the differences.

    ``shard`` is (number, count) where they are one of ``count`` equal slices, ``rank`` the process
    that holds exactly this part, on the side that was asked about.
    """

    dim: int
    start: int
    stop: int
    lines: tuple[int, ...]
    shard: tuple[int, int] | None
    rank: int | None

    @property
    def where(self) -> str:
        """Name the lines."""
        return f"{'columns' if self.dim else 'rows'} {ranges(self.lines)}"

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Take the region out of a whole tensor."""
        return values.narrow(self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True, slots=True)
class RegionFault:
    """A region that holds all differences, the side (0, 1) that is off in it, and why."""

    region: Region
    off: int | None
    evidence: tuple[str, ...]

    def inside(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        """Both sides' values in the region."""
        return self.region.of(pair.first), self.region.of(pair.second)


def region_fault(pair: Pair, holders: tuple[Holder, Holder]) -> RegionFault | None:
    """Say in which lines of [out, in] a pair differs, and which side is off there."""
    parts = [
        [] if holder.snapshot is None else holder.snapshot.parts(pair.name) for holder in holders
    ]
    cut = next((side for side in (0, 1) if len(parts[side]) > 1), 0)
    found = find_region(pair.first, pair.second, [(p.rank, p.header.extents) for p in parts[cut]])
    if found is None:
        return None
    labels = [holder.label for holder in holders]
    evidence = [f"{pair.name}: all differences are in {found.where}"]
    off = None
    if found.rank is not None:
        # what the other side does not cut cannot end there by chance
        off = cut
        evidence.append(f"which is what rank {found.rank} of {labels[cut]} holds")
    inside = found.of(pair.first), found.of(pair.second)
    for side, values in enumerate(inside):
        said = garbage(values)
        if said is not None and garbage(inside[1 - side]) is None:
            off = side
            evidence.append(f"they are {said} on {labels[side]}")
        elif pair.stale is None and pair.previous is not None:
            if equal(values, found.of(pair.previous)):
                off = side
                evidence.append(f"there {labels[side]} has the previous weights")
    return RegionFault(found, off, tuple(evidence))


def find_region(
    first: torch.Tensor, second: torch.Tensor, extents: Sequence[tuple[int, Sequence[Extent]]]
) -> Region | None:
    """Say in which lines two tensors differ; None where the differences are all over them.

    ``extents`` holds the parts (rank, extents) in which a side holds the tensor.
    """
    off = differ(first, second)
    found = []
    for dim in range(2):
        lines = off.any(1 - dim)
        numbers = lines.nonzero().reshape(-1)
        if not len(numbers) or len(numbers) == len(lines):
            continue
        start, stop = int(numbers[0]), int(numbers[-1]) + 1
        rank = next(
            (
                number
                for number, part in extents
                if part[dim][:2] == (start, stop) and stop - start < part[dim][2]
            ),
            None,
        )
        shard = _slice(start, stop, len(numbers), len(lines))
        if shard is None and len(numbers) > len(lines) / 2:
            continue
        if shard is None and density(off, dim) < _DENSE:
            # scattered values, and not the lines that they happen to be in
            continue
        found.append(Region(dim, start, stop, tuple(numbers.tolist()), shard, rank))
    # a slice says more than rows do, and the smaller region more than the larger
    return min(found, key=lambda r: (r.shard is None, len(r.lines)), default=None)


def differ(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Say of each value whether it differs; NaN is equal to NaN."""
    return (first != second) & ~((first != first) & (second != second))


@dataclass(frozen=True, slots=True)
class FewValues:
    """Single values that differ: how many of how many, by how much at most, where, and how.

    ``small`` says that each moved by no more than a step of an optimizer may do.
    """

    count: int
    total: int
    largest: float
    where: str
    small: bool

    @property
    def share(self) -> str:
        """How many of all."""
        return f"{self.count:,} of {self.total:,} values differ{'s' if self.count == 1 else ''}"


def few_values(first: torch.Tensor, second: torch.Tensor, limit: int = _FEW) -> FewValues | None:
    """Say which values of two tensors of one shape differ, where at most ``limit`` do.

    None where more do, most of the values do, whole rows or columns, or one is not finite.
    """
    off = differ(first, second)
    count = int(off.sum())
    if not 0 < count <= min(limit, first.numel() // 8):
        return None
    if first.ndim == 2 and max(density(off, dim) for dim in range(2)) >= _DENSE:
        return None
    a, b = first[off], second[off]
    apart = (a - b).abs()
    if not torch.isfinite(apart).all():
        return None
    usual = float(torch.linalg.vector_norm(first)) / first.numel() ** 0.5
    larger = torch.maximum(a.abs(), b.abs()).clamp_min(usual)
    places = [str(place) for place in off.nonzero()[:4].tolist()]
    more = [f"{count - 4:,} more"] if count > 4 else []
    return FewValues(
        count,
        off.numel(),
        float(apart.max()),
        ", ".join(places + more),
        bool((apart <= _SMALL * larger).all()),
    )


def density(off: torch.Tensor, dim: int) -> float:
    """Return which share of the values differ in those lines of [out, in] in which any does."""
    lines = int(off.any(1 - dim).sum())
    return float(off.sum()) / (lines * off.shape[1 - dim])


def _slice(start: int, stop: int, count: int, total: int) -> tuple[int, int] | None:
    for shards in _SHARDS:
        size = total // shards
        if total % shards or size < 2:
            continue
        number = start // size
        if stop <= (number + 1) * size and count >= _FULL * size:
            return number, shards
    return None
