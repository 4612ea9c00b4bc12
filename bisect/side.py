"""One side of a comparison: its captured points as the reference takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from layerbisect.bisect.join import Chains
from layerbisect.bisect.precision import Precision
from layerbisect.captures.rows import PrefixKeys
from layerbisect.captures.store import Capture


@dataclass(frozen=True)
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
        if point not in self.capture.points:
            return False
        return bool(self.capture.has(point)[self.index].all())

    def read(self, point: str) -> torch.Tensor | None:
        """Read [flat, ...] in the compute dtype (IDs as int64), or None where a row lacks it."""
        if not self.has(point):
            return None
        values = torch.from_numpy(self.capture.read(point, self.index))
        return values.long() if point.endswith("expert_ids") else values.to(self.compute_dtype)

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


def boundary(layer: int, num_layers: int) -> str:
    """Name the residual stream at a layer boundary, 0 to ``num_layers``."""
    return f"layers.{layer}.input" if layer < num_layers else f"layers.{layer - 1}.output"


def _look_up(
    keys: PrefixKeys, values: NDArray[np.float64], wanted: NDArray[np.void]
) -> NDArray[np.float64]:
    known = np.flatnonzero(keys.known)
    unique, first = np.unique(keys.key[known], return_index=True)
    if not len(unique):
        return np.full(len(wanted), np.nan)
    slot = np.searchsorted(unique, wanted).clip(max=len(unique) - 1)
    return np.where(unique[slot] == wanted, values[known[first[slot]]], np.nan)
