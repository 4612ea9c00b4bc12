"""Lay rows out as the whole sequences that they belong to, by what each of them has seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.rows import PrefixKeys, Rows, parent_keys


@dataclass(frozen=True, slots=True)
class Chains:
    """Rows laid out as whole sequences, end to end, for models that need a row's prefix.

    ``row`` int [flat] is the row at each place; ``lengths`` are the sequences' lengths;
    ``fresh`` bool [flat] is False where an earlier sequence already had the row (a shared prompt);
    ``target`` int64 [flat] is the token that follows, or -1 at a sequence's end.
    """

    row: NDArray[np.intp]
    lengths: tuple[int, ...]
    fresh: NDArray[np.bool_]
    position: NDArray[np.int64]
    token: NDArray[np.int64]
    target: NDArray[np.int64]

    @property
    def scored(self) -> NDArray[np.bool_]:
        """Places whose prediction of the next token counts once (bool [flat])."""
        follows = np.zeros(len(self.row), bool)
        follows[:-1] = self.fresh[1:] & (self.target[:-1] >= 0)
        return follows


def first_of_each(keys: PrefixKeys) -> NDArray[np.intp]:
    """Say which rows (int [key]) are the first of each key that is known, in the keys' order."""
    known = np.flatnonzero(keys.known)
    _, first = np.unique(keys.key[known], return_index=True)
    return known[first]


def lay_out(rows: Rows, keys: NDArray[np.void]) -> Chains:
    """Follow each row's parent back to its sequence's start.

    ``keys`` (``KEY_DTYPE`` [row]) are the rows', sorted and each there once. Rows whose sequence
    has no start among them are left out.
    """
    parents = parent_keys(keys, rows)
    slot = np.searchsorted(keys, parents).clip(max=len(keys) - 1)
    has_parent = (keys[slot] == parents) & (rows.position > 0)
    parent = np.where(has_parent, slot, -1)
    is_leaf = np.ones(len(keys), bool)
    is_leaf[parent[parent >= 0]] = False
    seen = np.zeros(len(keys), bool)
    order: list[NDArray[np.intp]] = []
    fresh: list[NDArray[np.bool_]] = []
    for leaf in np.flatnonzero(is_leaf):
        path = _path(int(leaf), parent)
        if rows.position[path[0]] != 0:
            continue
        order.append(path)
        fresh.append(~seen[path])
        seen[path] = True
    row = np.concatenate(order) if order else np.empty(0, np.intp)
    token = rows.token[row]
    target = np.full(len(row), -1, np.int64)
    target[:-1] = token[1:]
    lengths = tuple(len(path) for path in order)
    target[np.cumsum(lengths, dtype=np.intp) - 1] = -1
    return Chains(
        row=row,
        lengths=lengths,
        fresh=np.concatenate(fresh) if fresh else np.empty(0, bool),
        position=rows.position[row].astype(np.int64),
        token=token,
        target=target,
    )


def _path(leaf: int, parent: NDArray[np.intp]) -> NDArray[np.intp]:
    path = [leaf]
    while parent[path[-1]] >= 0:
        path.append(int(parent[path[-1]]))
    return np.array(path[::-1], np.intp)
