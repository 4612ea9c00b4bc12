"""One side of a comparison: its captured points as the reference takes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from layerbisect.bisect.checkpoint import TensorCache
from layerbisect.bisect.precision import Precision
from layerbisect.captures.chains import Chains
from layerbisect.captures.points import boundary
from layerbisect.captures.rows import PrefixKeys
from layerbisect.captures.store import Capture

KEPT_BYTES = 256 * 2**20
"""Values kept of one side, so that its files are read once where the points asked for fit."""


@dataclass(frozen=True, eq=False)
class Side:
    """A capture restricted to the joined rows, laid out as whole sequences.

    ``index`` int [flat] gives the capture's row at each place of ``chains``.
    """

    capture: Capture
    chains: Chains
    index: NDArray[np.intp]
    compute_dtype: torch.dtype

    @property
    def label(self) -> str:
        """What the verdict calls this side."""
        return self.capture.label

    @property
    def dtype(self) -> str:
        """Name of the dtype in which the engine computed."""
        return self.capture.info.dtype

    @property
    def forced(self) -> bool:
        """Whether another capture's routes were forced on this side: it chose no experts."""
        return self.capture.info.routes != "own"

    @property
    def low(self) -> Precision:
        """The low-precision reference of this side: every operator rounds as the engine does."""
        return Precision.all_in(getattr(torch, self.dtype))

    @property
    def fresh(self) -> torch.Tensor:
        """Places (int64 [n]) that no earlier sequence of the layout already had."""
        return torch.nonzero(torch.from_numpy(self.chains.fresh)).squeeze(1)

    @property
    def reducing_ranks(self) -> int:
        """How many ranks' partial sums are added behind row-parallel projections and experts."""
        parallel = self.capture.info.parallel
        return max(1, parallel.get("tp", 1), parallel.get("ep", 1))

    def has(self, point: str) -> bool:
        """Say whether every row of the layout has ``point``."""
        return point in self.capture.points and bool(self.holds(point, self._rows).all())

    def holds(self, point: str, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Say which of the capture's ``rows`` (int [n]) have ``point``: bool [n]."""
        if point not in self.capture.points:
            return np.zeros(len(rows), bool)
        if point not in self._has:
            self._has[point] = self.capture.has(point)
        return self._has[point][rows]

    def read(self, point: str) -> torch.Tensor | None:
        """Read [flat, ...] in the compute dtype (IDs as int64), or None where a row lacks it."""
        if not self.has(point):
            return None
        values = torch.from_numpy(self.values(point, self.index))
        return values.long() if point.endswith("expert_ids") else values.to(self.compute_dtype)

    def values(self, point: str, rows: NDArray[np.intp]) -> NDArray[Any]:
        """Read a point's values ([n, ...]) for some of the capture's rows, which must have it.

        What the layout needs of a point is read once and kept, as far as it fits.
        """
        if not self.has(point) or not np.isin(rows, self._rows).all():
            return self.capture.read(point, rows)
        held = self._kept.get(point, lambda: torch.from_numpy(self.capture.read(point, self._rows)))
        picked: NDArray[Any] = held.numpy()[np.searchsorted(self._rows, rows)]
        return picked

    @cached_property
    def _rows(self) -> NDArray[np.intp]:
        return np.unique(self.index)

    @cached_property
    def _has(self) -> dict[str, NDArray[np.bool_]]:
        return {}

    @cached_property
    def _kept(self) -> TensorCache:
        return TensorCache(KEPT_BYTES)

    def stream(self, layer: int, num_layers: int) -> torch.Tensor | None:
        """Read the residual stream at a boundary: entering ``layer``, or leaving the last one."""
        return self.read(boundary(layer, num_layers))

    def scores(self) -> torch.Tensor:
        """Log-prob (float64 [flat], nat) of each place's next token; nan where there is none."""
        chains = self.chains
        keys = self.capture.keys.key[self.index]
        table = self.capture.scores
        out = np.full(len(chains.row), np.nan)
        if len(table.logprob):
            wanted = np.flatnonzero(chains.target >= 0)
            out[wanted] = _look_up(table.keys, table.logprob, keys[wanted + 1])
        return torch.from_numpy(out)


def _look_up(
    keys: PrefixKeys, values: NDArray[np.float64], wanted: NDArray[np.void]
) -> NDArray[np.float64]:
    known = np.flatnonzero(keys.known)
    unique, first = np.unique(keys.key[known], return_index=True)
    if not len(unique):
        return np.full(len(wanted), np.nan)
    slot = np.searchsorted(unique, wanted).clip(max=len(unique) - 1)
    return np.where(unique[slot] == wanted, values[known[first[slot]]], np.nan)
