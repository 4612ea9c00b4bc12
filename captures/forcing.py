"""What the rows of an open call must be routed to, and how many were; the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.routes import Choice, Routes
from layerbisect.captures.rows import PrefixKeys

Guard = Callable[[str], AbstractContextManager[None]]
"""Runs a block of ours so that an error in it does not reach the model; takes what it is about."""


class Forcing:
    """Hands out a capture's routes for the call that is open.

    Args:
        routes: whose routes; with their weights where they were opened with them.
        layers: those with experts that this process computes.
    """

    def __init__(self, routes: Routes, layers: Iterable[int]) -> None:
        self.routes = routes
        self.layers = tuple(layers)
        self._keys: PrefixKeys | None = None
        self._index: NDArray[np.int64] = np.empty(0, np.int64)
        # in how many layers each row of the grid was forced
        self._times: NDArray[np.intp] = np.empty(0, np.intp)
        self._rows = self._kept = 0

    def begin(self, keys: PrefixKeys, index: NDArray[np.int64], grid: int) -> None:
        """Open a call: ``index`` int64 [row] places the rows of ``keys`` among ``grid``."""
        self._keys, self._index = keys, index
        self._times = np.zeros(grid, np.intp)

    def forget(self) -> None:
        """Leave calls alone until the next :meth:`begin`; one that was open broke off."""
        self._keys = None

    def end(self) -> None:
        """Close the call that is open, and count its rows."""
        if self._keys is not None:
            self._rows += len(self._index)
            self._kept += int((self._times[self._index] < len(self.layers)).sum())
        self.forget()

    def choice(self, layer: int, grid: int) -> Choice | None:
        """What a router must choose in its ``grid`` rows; None where no call is open.

        Raises:
            ValueError: the open call has another grid.
            LayerBisectError: as :meth:`Routes.look_up` does.
        """
        if self._keys is None:
            return None
        if grid != len(self._times):
            raise ValueError(f"a router was given {grid} rows, and not {len(self._times)}")
        some = self.routes.look_up(layer, self._keys)
        found = np.zeros(grid, bool)
        found[self._index] = some.found
        ids = np.full((grid, some.ids.shape[1]), -1, np.int64)
        ids[self._index] = some.ids
        weights = None
        if some.weights is not None:
            weights = np.full(ids.shape, np.nan, np.float32)
            weights[self._index] = some.weights
        return Choice(found, ids, weights)

    def count(self, choice: Choice) -> None:
        """Take note that a layer's router chose so."""
        self._times += choice.found

    def problems(self) -> list[str]:
        """Say in sentences where the routes of the calls so far were not those wanted."""
        return self.routes.problems(self._rows, self._kept)
