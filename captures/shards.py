"""Assemble a logical tensor from the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import TensorHeader

_STEPS = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23, "F64": 2.0**-52}
"""Distance of neighbouring numbers, over the smaller of them at most."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of some rows of a point.

    ``rows`` (int [n]) says which assembled rows the ``values`` ([n, ...]) belong to; ``dtype`` is
    the safetensors name of the dtype in which they were stored; ``source`` names the rank.
    """

    header: TensorHeader
    rows: NDArray[np.intp]
    values: NDArray[Any]
    dtype: str
    source: str


class Disagreement(str):
    """A sentence on two replicas of a part that differ.

    ``rounding`` says whether no value differs by more than a rounding of its dtype, as where ranks
    add in different orders.
    """

    rounding: bool

    def __new__(cls, sentence: str, rounding: bool) -> Disagreement:
        made = super().__new__(cls, sentence)
        made.rounding = rounding
        return made


@dataclass(frozen=True, slots=True)
class Assembled:
    """A whole tensor ([row, ...]), and what is to be said of replicas of a part that disagree."""

    values: NDArray[Any]
    disagreements: tuple[Disagreement, ...]


def assemble(pieces: Sequence[Piece], num_rows: int) -> Assembled:
    """Put shards together, add partial sums and compare replicas.

    Partial sums are added in float32 in rank order and rounded to the dtype they were stored in,
    as an all-reduce would leave them.

    Raises:
        CaptureError: shards that leave a gap or overlap without being replicas, dimensions that
            disagree, or a partial sum without one of its parts.
    """
    counts = {p.header.partial_sum[1] if p.header.partial_sum else 0 for p in pieces}
    if len(counts) > 1:
        raise CaptureError("some ranks hold partial sums of it and others do not")
    count = counts.pop()
    if not count:
        return _tile(pieces, num_rows)
    total: NDArray[Any] | None = None
    disagreements: tuple[Disagreement, ...] = ()
    for index in range(count):
        terms = [p for p in pieces if p.header.partial_sum and p.header.partial_sum[0] == index]
        if not terms:
            raise CaptureError(f"partial sum {index} of {count} is missing; a rank wrote nothing")
        term = _tile(terms, num_rows)
        disagreements += term.disagreements
        # infinities of opposite signs make a NaN, as they would in an all-reduce
        with np.errstate(invalid="ignore", over="ignore"):
            total = term.values if total is None else total + term.values
    assert total is not None
    return Assembled(_round(total, pieces[0].dtype), disagreements)


def _tile(pieces: Sequence[Piece], num_rows: int) -> Assembled:
    first = pieces[0]
    whole = not _sharded(pieces) and len(first.rows) == num_rows
    if len(pieces) == 1 and whole and np.array_equal(first.rows, np.arange(num_rows)):
        return Assembled(first.values, ())
    shape = _shape(first, num_rows)
    out = np.zeros(shape, first.values.dtype)
    covered = np.zeros(shape[:1] if not _sharded(pieces) else shape, bool)
    disagreements: list[Disagreement] = []
    for piece in pieces:
        if piece.header.dims != first.header.dims or _shape(piece, num_rows) != shape:
            raise CaptureError(
                f"{piece.source} has {list(piece.header.dims)} of {list(_shape(piece, num_rows))}, "
                f"and {first.source} {list(first.header.dims)} of {list(shape)}"
            )
        region = _region(piece, covered.ndim)
        already = covered[region]
        if already.all():
            disagreements += _compared(out[_region(piece, len(shape))], piece)
            continue
        if already.any():
            raise CaptureError(
                f"shards overlap without being replicas: {piece.source} holds "
                f"{dict(piece.header.shards) or 'rows'} of it, partly held by another rank"
            )
        out[_region(piece, len(shape))] = piece.values
        covered[region] = True
    if not covered.all():
        raise CaptureError(
            f"shards do not tile it: {1 - covered.mean():.0%} of the values are on no rank; "
            "a rank wrote nothing, or its shard is described wrongly"
        )
    return Assembled(out, tuple(disagreements))


def _sharded(pieces: Sequence[Piece]) -> bool:
    # a share of the rows is told by the rows themselves
    return any(set(p.header.shards) - {"row"} for p in pieces)


def _shape(piece: Piece, num_rows: int) -> tuple[int, ...]:
    return (num_rows, *piece.header.whole(piece.values.shape)[1:])


def _region(piece: Piece, ndim: int) -> tuple[Any, ...]:
    """Index of the piece's part: its rows, and a slice of each sharded dimension."""
    slices: list[Any] = [piece.rows]
    for dim in piece.header.dims[1:ndim]:
        shard = piece.header.shards.get(dim)
        slices.append(slice(shard[0], shard[1]) if shard else slice(None))
    return tuple(slices)


def _compared(held: NDArray[Any], piece: Piece) -> list[Disagreement]:
    """Compare a replica with what another rank holds of the same part."""
    other = piece.values
    different = (held != other) & ((held == held) | (other == other))
    if not different.any():
        return []
    rows = int(different.any(tuple(range(1, held.ndim))).sum())
    sentence = (
        f"replicas disagree: {piece.source} differs in {int(different.sum())} values of {rows} "
        "rows from a rank that holds the same part"
    )
    return [Disagreement(sentence, _by_rounding(held, other, piece.dtype))]


def _by_rounding(a: NDArray[Any], b: NDArray[Any], dtype: str) -> bool:
    """Say whether no value differs by more than one step of its dtype, and half of a usual one."""
    step = _STEPS.get(dtype)
    if step is None:
        return False
    a, b = a.astype(np.float64), b.astype(np.float64)
    size = np.maximum(np.abs(a), np.abs(b))
    usual = np.sqrt(np.square(a).mean(tuple(range(1, a.ndim)), keepdims=True))
    with np.errstate(invalid="ignore"):
        return bool((np.abs(a - b) <= step * (size + 0.5 * usual))[a != b].all())


def _round(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype != "BF16":
        return values
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # round to nearest, ties to even: add half a unit, and one less where the kept part is even
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return np.where(np.isfinite(values), rounded.view(np.float32), values)
