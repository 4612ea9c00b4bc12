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
from layerbisect.bisect.shapes.chance import normal_ranks
from layerbisect.bisect.verdict import Culprit, RuledOut, Verdict
from layerbisect.captures.errors import RecordError, TokenMismatchError
from layerbisect.captures.record.call import replays
from layerbisect.captures.record.file import ScoreRecord

_TOGETHER = 0.5
_ALONE = 0.15
_OPENED = 1.5
_FEWEST = 200


@dataclass(frozen=True, slots=True)
class _Moves:
    """How the two sides' scores moved across the update, token by token (nat).

    ``by`` are mean absolute moves and ``repeats`` what the new repeats differ by; ``together`` is
    the rank correlation of the two sides' moves; ``gap_before`` and ``gap_after`` are B-C.
    """

    by: Mapping[str, float]
    repeats: Mapping[str, float]
    together: float
    tokens: int
    gap_before: float
    gap_after: float

    def stood(self, side: str) -> bool:
        """Whether the side scores as before, as far as its repeats can tell."""
        return self.by[side] <= CLEAR * self.repeats[side]

    def said(self) -> tuple[str, ...]:
        """The moves in sentences."""
        return (
            *(
                f"the {side}'s scores moved by {self.by[side]:.6f} nat across the update (its "
                f"repeats differ by {self.repeats[side]:.6f})"
                for side in ("rollout", "trainer")
            ),
            f"the two sides' moves have a rank correlation of {self.together:+.2f} over "
            f"{self.tokens} tokens",
            f"B-C went from {self.gap_before:.6f} to {self.gap_after:.6f} nat",
        )


def judge_update(
    old: ScoreRecord, new: ScoreRecord, *, tolerance: float = 0.01, epsilon: float = 0.2
) -> Verdict:
    """Judge the new scores, and say which side, if one, kept the old weights.

    A side that scores as its repeats do has its old weights. Where both moved, an update that both
    have moves their scores together, token by token, while what another batch does to one side has
    nothing to do with the other's move. An update that moves scores less than that says nothing.

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
    verdict = judge([new.without("A")], tolerance=tolerance, epsilon=epsilon)
    moves = _moves(old, new)
    said = moves.said()
    verdict = replace(verdict, reasons=(*verdict.reasons, *said))
    stood = [side for side in ("rollout", "trainer") if moves.stood(side)]
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
        return _stale(verdict, stood[0], f"the {stood[0]} scores as it did before the update", said)
    if moves.together >= _TOGETHER:
        ruled = RuledOut("stale weights", "; ".join(said[-2:]))
        return replace(verdict, ruled_out=(ruled, *verdict.ruled_out))
    lagging, leading = sorted(moves.by, key=lambda side: moves.by[side])
    alone = abs(moves.together) <= _ALONE and moves.tokens >= _FEWEST
    if (
        alone
        and moves.gap_after > _OPENED * moves.gap_before
        and (moves.by[leading] > _OPENED * moves.by[lagging])
    ):
        why = f"the {lagging}'s scores moved, but not with the {leading}'s: as in another batch"
        return _stale(verdict, lagging, why, said)
    return replace(
        verdict,
        reasons=(
            *verdict.reasons,
            "the scores cannot tell whether both sides have the update: it moves them no more "
            "than noise does; compare what is held (`layerbisect weights`)",
        ),
    )


def _stale(verdict: Verdict, side: str, why: str, said: tuple[str, ...]) -> Verdict:
    culprit = Culprit(
        layer=None,
        point="weights",
        operator="weights",
        side=side,
        share_of_gap=None,
        own_error=float("nan"),
        floor=1.0,
        where="all response tokens",
        evidence=(why, *said),
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


def _moves(old: ScoreRecord, new: ScoreRecord) -> _Moves:
    def column(record: ScoreRecord, letter: str, number: int) -> NDArray[np.float64]:
        name = replays(record.columns, letter)[number]
        scores = {c.name: np.where(c.mask, c.scores[name], np.nan) for c in record}
        # the records may hold the calls in different orders
        return np.concatenate([scores[call] for call in old.names])

    before = {letter: column(old, letter, 0) for letter in "BC"}
    after = {letter: column(new, letter, 0) for letter in "BC"}
    again = {letter: column(new, letter, 1) for letter in "BC"}
    used = np.isfinite([*before.values(), *after.values(), *again.values()]).all(0)
    move = {letter: (after[letter] - before[letter])[used] for letter in "BC"}
    sides = (("rollout", "B"), ("trainer", "C"))
    return _Moves(
        by={side: float(np.abs(move[letter]).mean()) for side, letter in sides},
        repeats={
            side: float(np.abs((after[letter] - again[letter])[used]).mean())
            for side, letter in sides
        },
        together=_rank_correlation(move["B"], move["C"]),
        tokens=int(used.sum()),
        gap_before=float(np.abs((before["B"] - before["C"])[used]).mean()),
        gap_after=float(np.abs((after["B"] - after["C"])[used]).mean()),
    )


def _rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Spearman's correlation; 0 where a side does not vary."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.mean(normal_ranks(first) * normal_ranks(second)))
