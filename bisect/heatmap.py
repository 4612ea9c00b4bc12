"""Reduce a measure of many rows to a heatmap that can be looked at, with its worst cells kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.token_report import Column, Heatmap, Measure, Unit

COLUMNS = 512
"""So many columns a heatmap has at most."""


@dataclass(frozen=True, slots=True)
class HeatRows:
    """The rows of a heatmap, sequence after sequence and with no hole in any.

    ``sequence`` int [row] indexes ``names``, ``position`` int64 [row] counts in the sequence.
    """

    names: tuple[str, ...]
    sequence: NDArray[np.intp]
    position: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def starts(self) -> NDArray[np.intp]:
        """Where each sequence's rows start (int [sequence])."""
        first = np.ones(len(self), bool)
        first[1:] = self.sequence[1:] != self.sequence[:-1]
        return np.flatnonzero(first)


def significant(values: Iterable[float], digits: int = 4) -> tuple[float | None, ...]:
    """Round to so many significant digits; what is not finite becomes None."""
    return tuple(
        float(f"{value:.{digits}g}") if -np.inf < value < np.inf else None for value in values
    )


def reduce_rows(
    measure: Measure, unit: Unit, values: Mapping[int, NDArray[np.float32]], rows: HeatRows
) -> Heatmap | None:
    """Put neighbouring rows of a sequence together until there are `COLUMNS` columns or fewer.

    Args:
        measure: what is shown, in ``unit``.
        values: of each boundary the rows' values (float32 [row], none below 0); what is not finite
            is none.
        rows: where the rows are.

    A column has the largest value of its rows. Where there are more sequences than columns, those
    with the largest values get one each. Returns None where there is nothing to show.
    """
    finite = {n: np.where(np.isfinite(v), v, np.nan) for n, v in sorted(values.items())}
    if not len(rows) or all(np.isnan(v).all() for v in finite.values()):
        return None
    left_out = 0
    if len(rows.starts) > COLUMNS:
        kept = _worst_sequences(finite, rows)
        left_out = int((~kept).sum())
        finite = {n: v[kept] for n, v in finite.items()}
        rows = HeatRows(rows.names, rows.sequence[kept], rows.position[kept])
    starts = _columns(rows)
    tops, worst = [], []
    for value in finite.values():
        top, at = _largest(value, starts)
        tops.append(significant(top.tolist()))
        worst.append(tuple(rows.position[at].tolist()))
    last = np.append(starts[1:], len(rows)) - 1
    return Heatmap(
        measure=measure,
        unit=unit,
        boundaries=tuple(finite),
        columns=tuple(
            Column(rows.names[sequence], start, stop + 1)
            for sequence, start, stop in zip(
                rows.sequence[starts].tolist(),
                rows.position[starts].tolist(),
                rows.position[last].tolist(),
                strict=True,
            )
        ),
        values=tuple(tops),
        worst=tuple(worst) if len(starts) < len(rows) else (),
        left_out=left_out,
    )


def _columns(rows: HeatRows) -> NDArray[np.intp]:
    """Where columns start (int [column]): every so many rows of a sequence, as few as will do."""
    starts = rows.starts
    lengths = np.diff(np.append(starts, len(rows)))
    low, high = 1, int(lengths.max())
    while low < high:
        width = (low + high) // 2
        fits = int((-(-lengths // width)).sum()) <= COLUMNS
        low, high = (low, width) if fits else (width + 1, high)
    within = np.arange(len(rows)) - np.repeat(starts, lengths)
    return np.flatnonzero(within % low == 0)


def _largest(
    value: NDArray[np.float32], starts: NDArray[np.intp]
) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    """Largest value of each column, nan where it has none, and the first row that has it."""
    count = len(value)
    top = np.fmax.reduceat(value, starts)
    same = value == np.repeat(top, np.diff(np.append(starts, count)))
    at = np.minimum.reduceat(np.where(same, np.arange(count), count), starts)
    return top, np.where(at < count, at, starts)


def _worst_sequences(
    values: Mapping[int, NDArray[np.float32]], rows: HeatRows
) -> NDArray[np.bool_]:
    """Rows (bool [row]) of those sequences with the largest values, as a part of the boundary's."""
    starts = rows.starts
    rank = np.zeros(len(starts))
    first: list[int] = []
    for value in values.values():
        top = np.nan_to_num(np.fmax.reduceat(value, starts))
        best = int(top.argmax())
        # the largest of each boundary is there whatever else is
        first.append(best)
        rank = np.fmax(rank, top / top[best] if top[best] > 0 else 0.0)
    order = np.argsort(-rank, kind="stable").tolist()
    chosen = list(dict.fromkeys([*first, *order]))[:COLUMNS]
    kept = np.zeros(len(starts), bool)
    kept[chosen] = True
    return np.repeat(kept, np.diff(np.append(starts, len(rows))))
