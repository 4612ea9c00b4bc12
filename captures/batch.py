"""The rows of one forward pass, as the recorder and the adapters share them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.format import Phase, SequenceInfo
from layerbisect.captures.rows import Rows


@dataclass(frozen=True, slots=True)
class RowPart:
    """The rows of a pass that a rank holds where the rows are scattered over ranks.

    Args:
        grid: how many rows the engine's tensors have there.
        index: int64 [stop - start], which of them each row is.
        start, stop: which of the pass's rows they are.
    """

    grid: int
    index: NDArray[np.int64]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward pass.

    Args:
        rows: what each recorded row is; ``rows.sequence`` indexes ``sequences``.
        grid: how many rows the engine's flattened tensors have, padding and others' requests
            included.
        index: int64 [row], which of the ``grid`` rows each recorded row is.
        context: tokens of these sequences that no row of this pass computed (a cached prefix).
        part: this rank's rows at the points that an engine scatters over ranks.
        recomputes: number of the pass that is computed again, of a ``recompute`` pass.
    """

    phase: Phase
    sequences: tuple[SequenceInfo, ...]
    rows: Rows
    grid: int
    index: NDArray[np.int64]
    context: Rows = field(default_factory=Rows.empty)
    part: RowPart | None = None
    recomputes: int | None = None
