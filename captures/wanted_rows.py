"""Which sequences of a job's batch another capture holds, so that only those are recorded."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.rows import Rows, prefix_keys
from layerbisect.captures.store import Capture


class WantedSequences:
    """The token sequences of a capture.

    Raises LayerBisectError for a capture of which no sequence is known from its start.
    """

    def __init__(self, capture: Capture | str | os.PathLike[str]) -> None:
        opened = capture if isinstance(capture, Capture) else Capture.open(capture)
        known = np.flatnonzero(opened.keys.known)
        if not len(known):
            raise LayerBisectError(
                f"{opened.directory} holds no sequence from its start, so nothing can be chosen by "
                "it; capture whole sequences there (flush the prefix cache first)"
            )
        rows = opened.rows.take(known)
        self._directory = opened.directory
        self._rows = rows.take(rows.sequence == rows.sequence.min())
        self._keys = np.unique(opened.keys.key[known])
        self._last = np.unique(opened.keys.key[known[_ends(rows)]])

    def chosen(self, rows: Rows, salts: Sequence[str]) -> NDArray[np.bool_]:
        """Say of each sequence of ``rows`` whether it is wanted: bool [sequence].

        It is where one of the capture's is the beginning of it, or it the beginning of one: some
        first tokens in common are not enough. ``salts`` holds one for each sequence.
        """
        wanted = np.zeros(len(salts), bool)
        if not len(rows):
            return wanted
        keys = prefix_keys(rows, rows, salts)
        whole = np.isin(keys.key, self._last) & keys.known
        wanted[rows.sequence[whole]] = True
        ends = _ends(rows)
        inside = np.isin(keys.key[ends], self._keys) & keys.known[ends]
        wanted[rows.sequence[ends[inside]]] = True
        return wanted

    def none_of(self, count: int, first: Rows) -> str:
        """Say that none of ``count`` sequences is wanted, and where the ``first`` differs."""
        said = f"{count} sequences were seen and none is in {self._directory}"
        mine, theirs = (dict(zip(r.position, r.token, strict=True)) for r in (first, self._rows))
        for position in sorted(mine.keys() & theirs.keys()):
            if mine[position] != theirs[position]:
                said += (
                    f": at position {position} the first seen has token {mine[position]}, and the "
                    f"first there {theirs[position]}"
                )
                break
        return f"{said}; capture the round of the job that scores these sequences"


def _ends(rows: Rows) -> NDArray[np.intp]:
    """Find the last row of each sequence."""
    order = np.lexsort((rows.position, rows.sequence))
    ends: NDArray[np.intp] = order[np.append(np.diff(rows.sequence[order]) != 0, True)]
    return ends
