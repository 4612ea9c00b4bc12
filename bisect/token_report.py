"""What a verdict says of single tokens: how their gap is spread, and where in the layers it grows.

Figures that are shown and not judged by. They are rounded to four significant digits, and
log-probs to seven, so that their differences are right to the last place that is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from layerbisect.bisect.scores.report import PositionGap, TokenGap

Measure = Literal["carried gap", "stream"]
"""``carried gap``: absolute difference (nat) of the log-probs that a common tail reads out of both
sides' states. ``stream``: difference of the two residual streams, relative to their size."""

Unit = Literal["nat", "relative"]
"""``relative``: a part of the stream's own size."""

_DECADES = range(-5, 3)
_STEPS = (1.0, 1.8, 3.2, 5.6)
_POSITIVE = [step * 10.0**decade for decade in _DECADES for step in _STEPS] + [1000.0]
EDGES: tuple[float, ...] = (*(-edge for edge in reversed(_POSITIVE)), *_POSITIVE)
"""Edges (nat) of the bins of signed differences: one bin about 0, four a decade on either side."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many tokens differ by how much: ``counts`` [bin] between ``edges`` [bin + 1] (nat).

    Signed, first minus second; what lies beyond the outermost edges is counted in the outermost
    bins.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class DistributionMeasure:
    """Counts signed differences in bins, of any number of tokens."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(EDGES) - 1, np.int64)

    def add(self, difference: NDArray[np.float64]) -> None:
        """Take in finite differences, float64 [token] (nat)."""
        inside = np.clip(difference, EDGES[0], EDGES[-1])
        self._counts += np.histogram(inside, EDGES)[0]

    def report(self) -> Distribution | None:
        """The counts; None where nothing was added."""
        if not self._counts.any():
            return None
        return Distribution(EDGES, tuple(int(count) for count in self._counts))


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """A joined sequence: its tokens, and what both sides scored them (nat).

    ``tokens`` [token] are IDs from position ``start`` on; ``first`` and ``second`` [token] are the
    log-probs of these tokens given those before them, None where a side has none.
    """

    name: str
    start: int
    tokens: tuple[int, ...]
    first: tuple[float | None, ...]
    second: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """Rows of a heatmap's column: positions ``start`` to ``stop - 1`` of a sequence.

    The row at a position has read the token there, and predicts the one after it.
    """

    sequence: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Heatmap:
    """A measure by layer boundary and row, with neighbouring rows put together where they are many.

    ``values`` [boundary][column] is the largest over a column's rows, None where none was measured,
    and ``worst`` [boundary][column] the position of the row that has it; ``worst`` is empty where
    every column is one row. ``boundaries`` are numbered as layers are, and the last one is what
    leaves the last layer. ``left_out`` counts rows of sequences that have no column because there
    are too many sequences; no boundary's largest value is among them.
    """

    measure: Measure
    unit: Unit
    boundaries: tuple[int, ...]
    columns: tuple[Column, ...]
    values: tuple[tuple[float | None, ...], ...]
    worst: tuple[tuple[int, ...], ...] = ()
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class TokenReport:
    """The tokens of two captures: the gap of their log-probs, first minus second, and heatmaps.

    ``by_position`` counts positions from the sequence's start. ``worst`` are the largest
    differences; a ``position`` there is the scored token's. ``worst`` and ``by_position`` are empty
    where no scores are in both captures.
    """

    distribution: Distribution | None
    by_position: tuple[PositionGap, ...]
    worst: tuple[TokenGap, ...]
    sequences: tuple[SequenceTokens, ...]
    heatmaps: tuple[Heatmap, ...]
