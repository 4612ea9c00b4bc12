"""Join two captures on the prefix that each row has seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.chains import Chains, first_of_each, lay_out
from layerbisect.captures.errors import LayerBisectError, TokenMismatchError
from layerbisect.captures.rows import PrefixKeys, Rows, parent_keys
from layerbisect.captures.store import Capture, ScoreTable

_Keys = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Joined:
    """Rows that both captures hold; ``rollout``/``trainer`` int [row] index the captures' rows.

    ``keys`` [row] are the rows' prefix keys, in order, which is the same in any pair of captures.
    ``left_out`` counts the rows of either side that the other lacks, ``keyless`` those among them
    whose prefix is not known. ``score_rollout``/``score_trainer`` float64 [score] are both sides'
    log-probs (nat) of the same tokens, ``score_rows`` those tokens in the rollout's sequences, and
    ``score_keys`` [score] their keys.
    """

    rollout: NDArray[np.intp]
    trainer: NDArray[np.intp]
    keys: _Keys
    left_out: int
    keyless: int
    chains: Chains
    score_rollout: NDArray[np.float64]
    score_trainer: NDArray[np.float64]
    score_rows: Rows
    score_keys: _Keys

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
    unique = [first_of_each(c.keys) for c in sides]
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
    score_keys, score_rows, scores = _join_scores(rollout.scores, trainer.scores)
    keyless = sum(int((~c.keys.known).sum()) for c in sides)
    return Joined(
        rollout=rows[0],
        trainer=rows[1],
        keys=common,
        left_out=len(keys[0]) + len(keys[1]) - 2 * len(common) + keyless,
        keyless=keyless,
        chains=lay_out(rollout.rows.take(rows[0]), common),
        score_rollout=scores[0],
        score_trainer=scores[1],
        score_rows=score_rows,
        score_keys=score_keys,
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


def _join_scores(
    rollout: ScoreTable, trainer: ScoreTable
) -> tuple[_Keys, Rows, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    firsts = [first_of_each(table.keys) for table in (rollout, trainer)]
    keys, a, b = np.intersect1d(
        rollout.keys.key[firsts[0]],
        trainer.keys.key[firsts[1]],
        assume_unique=True,
        return_indices=True,
    )
    ours, theirs = firsts[0][a], firsts[1][b]
    return keys, rollout.rows.take(ours), (rollout.logprob[ours], trainer.logprob[theirs])
