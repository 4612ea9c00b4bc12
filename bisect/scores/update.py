"""A saved response carried across a weight update: was the update installed on the rollout side?

The old record holds what both sides said of the response at the old weights, the new one what they
say of the same tokens at the new weights. A belongs to the old weights and need not meet the new
ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.decision_map import CLEAR
from layerbisect.bisect.scores.judge import judge
from layerbisect.bisect.verdict import Culprit, RuledOut, Verdict
from layerbisect.captures.errors import RecordError, TokenMismatchError
from layerbisect.captures.record.call import replays
from layerbisect.captures.record.file import ScoreRecord


@dataclass(frozen=True, slots=True)
class _Moved:
    """How far a side's scores moved across the update (mean absolute, nat), and its repeats."""

    by: float
    repeats: float

    @property
    def stood(self) -> bool:
        """Whether the scores are the old ones, as far as repeats can tell."""
        return self.by <= CLEAR * self.repeats


def judge_update(
    old: ScoreRecord, new: ScoreRecord, *, tolerance: float = 0.01, epsilon: float = 0.2
) -> Verdict:
    """Judge the new scores, and say which side, if one, kept the old weights.

    Args:
        old: with B0 and C0, scored before the update.
        new: the same calls with B0, B1, C0 and C1, scored after it.
        tolerance, epsilon: as for :func:`layerbisect.bisect.scores.judge.judge`.

    Raises:
        TokenMismatchError: the records hold other calls or other tokens.
        RecordError: a column is missing.
    """
    for record, columns in ((old, ("B0", "C0")), (new, ("B0", "B1", "C0", "C1"))):
        lacking = [column for column in columns if column not in record.columns]
        if lacking:
            raise RecordError(
                f"{record.path or 'the record'} has no column {lacking[0]}; score it "
                "on both sides, the new one twice"
            )
    _check_same(old, new)
    # A is evidence from the old weights
    scored = new.without("A")
    verdict = judge([scored], tolerance=tolerance, epsilon=epsilon)
    moved = {
        side: _moved(old, new, letter) for side, letter in (("rollout", "B"), ("trainer", "C"))
    }
    said = tuple(
        f"the {side}'s scores moved by {move.by:.6f} nat across the update (repeats differ by "
        f"{move.repeats:.6f})"
        for side, move in moved.items()
    )
    verdict = replace(verdict, reasons=(*verdict.reasons, *said))
    if verdict.status == "unstable":
        return verdict
    stood = [side for side, move in moved.items() if move.stood]
    if len(stood) == 2:
        return replace(
            verdict,
            status="inconclusive",
            culprits=(),
            reasons=(
                "neither side's scores moved: there was no update, or neither side has it",
                *verdict.reasons,
            ),
            next="update the trainer, install its weights on the rollout side, and score again",
        )
    if stood:
        return _stale(verdict, stood[0], said)
    ruled = RuledOut("stale weights", "; ".join(said))
    return replace(verdict, ruled_out=(ruled, *verdict.ruled_out))


def _stale(verdict: Verdict, side: str, said: tuple[str, ...]) -> Verdict:
    culprit = Culprit(
        layer=None,
        point="weights",
        operator="weights",
        side=side,
        share_of_gap=None,
        own_error=float("nan"),
        floor=1.0,
        where="all response tokens",
        evidence=(f"the {side} scores as it did before the update", *said),
    )
    return replace(
        verdict,
        status="divergent",
        culprits=(culprit,),
        next="`layerbisect weights ROLLOUT TRAINER --previous OLD`, then follow the update through "
        "export, transfer and installation",
    )


def _check_same(old: ScoreRecord, new: ScoreRecord) -> None:
    if set(old.names) != set(new.names):
        differing = sorted(set(old.names) ^ set(new.names))
        raise TokenMismatchError(
            f"call {differing[0]!r} is in one record alone; carry the same calls across"
        )
    tokens = {call.name: call.tokens for call in old}
    for call in new:
        before = tokens[call.name]
        if not np.array_equal(before, call.tokens):
            at = 0
            if before.shape == call.tokens.shape:
                at = int((before != call.tokens).argmax())
            raise TokenMismatchError(
                f"call {call.name!r} has other tokens in the two records, from position {at} on "
                f"({before[at]} and {call.tokens[at]}); carry the same response across"
            )


def _moved(old: ScoreRecord, new: ScoreRecord, letter: str) -> _Moved:
    first, second = replays(new.columns, letter)[:2]
    before = _scores(old, replays(old.columns, letter)[0])
    after, again = _scores(new, first), _scores(new, second)
    names = list(before)
    return _Moved(
        by=_mean([np.abs(before[n] - after[n]) for n in names]),
        repeats=_mean([np.abs(after[n] - again[n]) for n in names]),
    )


def _scores(record: ScoreRecord, column: str) -> Mapping[str, NDArray[np.float64]]:
    return {call.name: np.where(call.mask, call.scores[column], np.nan) for call in record}


def _mean(parts: list[NDArray[np.float64]]) -> float:
    values = np.concatenate(parts)
    return float(values[np.isfinite(values)].mean())
