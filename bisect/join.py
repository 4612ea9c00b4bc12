"""Join two captures on the prefix that each row has seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import LayerBisectError, TokenMismatchError
from layerbisect.captures.rows import PrefixKeys, Rows, parent_keys
from layerbisect.captures.store import Capture, ScoreTable

_Keys = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Chains:
    """Joined rows laid out as whole sequences, end to end, for models that need a row's prefix.

    ``row`` int [flat] is the joined row at each place; ``lengths`` are the sequences' lengths;
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


@dataclass(frozen=True, slots=True)
class Joined:
    """Rows that both captures hold; ``rollout``/``trainer`` int [row] index the captures' rows.

    ``keys`` [row] are the rows' prefix keys, in order, which is the same in any pair of captures.
    ``left_out`` counts the rows of either side that the other lacks, ``keyless`` those among them
    whose prefix is not known. ``score_rollout``/``score_trainer`` float64 [score] are both sides'
    log-probs (nat) of the same tokens.
    """

    rollout: NDArray[np.intp]
    trainer: NDArray[np.intp]
    keys: _Keys
    left_out: int
    keyless: int
    chains: Chains
    score_rollout: NDArray[np.float64]
    score_trainer: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.rollout)


def join(rollout: Capture, trainer: Capture) -> Joined:
    """Pair the rows that have seen the same prefix.

    Raises:
        TokenMismatchError: after a common prefix the captures hold different tokens; names the
            first such position and both IDs.
        LayerBisectError: no row is common to both.
    """
    sides = (rollout, trainer)
    unique = [_first_of_each(c.keys) for c in sides]
    keys = [c.keys.key[u] for c, u in zip(sides, unique, strict=True)]
    common, at_rollout, at_trainer = np.intersect1d(
        keys[0], keys[1], assume_unique=True, return_indices=True
    )
    _refuse_different_tokens(rollout, trainer, common)
    if not len(common):
        raise LayerBisectError(
            f"{rollout.directory} and {trainer.directory} have no row in common: "
            f"{len(keys[0])} and {len(keys[1])} rows, no equal prefix of tokens; "
            "capture both sides on the same token IDs and the same adapter or image"
        )
    rows = (unique[0][at_rollout], unique[1][at_trainer])
    scores = _join_scores(rollout.scores, trainer.scores)
    keyless = sum(int((~c.keys.known).sum()) for c in sides)
    return Joined(
        rollout=rows[0],
        trainer=rows[1],
        keys=common,
        left_out=len(keys[0]) + len(keys[1]) - 2 * len(common) + keyless,
        keyless=keyless,
        chains=_chains(rollout.rows.take(rows[0]), common),
        score_rollout=scores[0],
        score_trainer=scores[1],
    )


def repeats(keys: PrefixKeys) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Find rows that a capture holds more than once.

    Returns (first, again): indexes of equal length, each row of ``again`` being a repeat of the
    row of ``first`` beside it. They measure the floor for free.
    """
    known = np.flatnonzero(keys.known)
    _, first, inverse = np.unique(keys.key[known], return_index=True, return_inverse=True)
    original = known[first[inverse]]
    again = original != known
    return original[again], known[again]


def _first_of_each(keys: PrefixKeys) -> NDArray[np.intp]:
    known = np.flatnonzero(keys.known)
    _, first = np.unique(keys.key[known], return_index=True)
    return known[first]


def _refuse_different_tokens(rollout: Capture, trainer: Capture, common: _Keys) -> None:
    """Two unmatched rows after one common prefix mean that the captures hold different tokens."""
    strays = []
    for capture in (rollout, trainer):
        alone = np.flatnonzero(capture.keys.known & ~np.isin(capture.keys.key, common))
        rows = capture.rows.take(alone)
        strays.append((rows, parent_keys(capture.keys.key[alone], rows)))
    (rows_a, parents_a), (rows_b, parents_b) = strays
    branching, at_a, at_b = np.intersect1d(parents_a, parents_b, return_indices=True)
    if not len(branching):
        return
    one = int(np.argmin(rows_a.position[at_a]))
    a, b = at_a[one], at_b[one]
    names = (
        rollout.sequences[rows_a.sequence[a]].name,
        trainer.sequences[rows_b.sequence[b]].name,
    )
    raise TokenMismatchError(
        f"different tokens at position {rows_a.position[a]}: {rollout.label} has "
        f"{rows_a.token[a]} (sequence {names[0]!r}), {trainer.label} has {rows_b.token[b]} "
        f"(sequence {names[1]!r}); capture both sides on the same token IDs, "
        "or choose sequences that both have"
    )


def _chains(rows: Rows, keys: _Keys) -> Chains:
    """Follow each row's parent back to the start; ``keys`` are sorted."""
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


def _join_scores(
    rollout: ScoreTable, trainer: ScoreTable
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    firsts = [_first_of_each(table.keys) for table in (rollout, trainer)]
    _, a, b = np.intersect1d(
        rollout.keys.key[firsts[0]],
        trainer.keys.key[firsts[1]],
        assume_unique=True,
        return_indices=True,
    )
    return rollout.logprob[firsts[0][a]], trainer.logprob[firsts[1][b]]
