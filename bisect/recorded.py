"""Join what a record of A, B and C says to what two captures say, into one verdict.

A capture holds the log-prob that an engine computed, a record the one that was kept. Where they are
the same, what the record shows is explained by what happens inside the engine, and the captures
tell it better. Where they differ, the fault lies between the two, and no layer is to blame for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike

import numpy as np

from layerbisect.bisect.budget import GAP_FACTOR
from layerbisect.bisect.scores.judge import judge
from layerbisect.bisect.verdict import Culprit, RuledOut, Verdict
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.record.call import is_score
from layerbisect.captures.record.captured import captured_scores
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.store import Capture

KEPT = 1e-3
"""Mean difference (nat) up to which a kept score is the captured one, whatever rounding predicts:
records and captures of one forward differ by how they were printed and read."""
FEWEST = 16
"""Fewer tokens that both hold tell nothing."""

BETWEEN = ("logprob", "inputs")
"""Operators between an engine's log-probs and the record."""


@dataclass(frozen=True, slots=True)
class Kept:
    """How a column of the record differs from the log-probs captured of the same tokens.

    ``mae`` is in nats over ``tokens``; ``allowed`` is what rounding explains.
    """

    column: str
    side: str
    tokens: int
    mae: float
    allowed: float

    @property
    def computed(self) -> bool:
        """Whether the kept score is the one that the engine computed."""
        return self.mae <= self.allowed


def with_record(
    found: Verdict, record: ScoreRecord | str | PathLike[str], sides: Sequence[Capture]
) -> Verdict:
    """Add to a verdict on two captures what a record of the same run says.

    Args:
        found: the verdict on ``sides``, the rollout's capture and the trainer's.
        record: at least two of A, B and C of the responses that were captured.

    Raises:
        LayerBisectError: captures that are not labelled ``rollout`` and ``trainer``.
        RecordError: no record, or one that cannot be judged.
        TrainerError: a call whose positions do not count its tokens.
    """
    labels = tuple(side.label for side in sides)
    if labels != ("rollout", "trainer"):
        raise LayerBisectError(
            f"a record has scores of a rollout and a trainer, and the captures are labelled "
            f"{' and '.join(labels)}; give the record where the rollout's capture is compared with "
            "the trainer's"
        )
    record = record if isinstance(record, ScoreRecord) else ScoreRecord.open(record)
    scored = judge([record])
    kept = tuple(_kept(record, sides, found))
    scored_culprits = [w for c in scored.culprits if (w := _weighed(c, found, kept)) is not None]
    told = {c.side for c in scored_culprits}
    scored_culprits += [_of_keeping(k) for k in _not_computed(kept) if k.side not in told]
    culprits = (*found.culprits, *scored_culprits)
    verdict = replace(
        found,
        culprits=culprits,
        scores=scored.scores,
        ruled_out=(*found.ruled_out, *_acquitted(kept)),
        coverage=replace(
            found.coverage, notes=(*found.coverage.notes, *_notes(kept, record, sides))
        ),
    )
    if culprits and found.status != "divergent":
        reasons = ("the record's scores are wrong, beyond what the captures show",)
        step = scored.next if not found.culprits else found.next
        return replace(verdict, status="divergent", reasons=reasons, next=step)
    if not culprits and found.status == "agree" and scored.status == "unstable":
        return replace(verdict, status="unstable", reasons=scored.reasons, next=scored.next)
    return verdict


def _kept(record: ScoreRecord, sides: Sequence[Capture], found: Verdict) -> Iterable[Kept]:
    """Hold the record's columns against the captured log-probs of the same tokens."""
    predicted = found.rounding_budget.predicted_gap if found.rounding_budget else 0.0
    for side, letters in zip(sides, ("AB", "C"), strict=True):
        computed = captured_scores(record, side)
        for column, scoring in record.info.columns.items():
            if column[0] not in letters or not is_score(column) or column == "C.grad":
                continue
            # a capture holds raw scores: others are not to be compared
            if scoring.definition not in ("raw", "unknown"):
                continue
            off = np.concatenate(
                [np.abs(call.scores[column] - computed[call.name])[call.mask] for call in record]
            )
            off = off[np.isfinite(off)]
            if len(off) >= FEWEST:
                allowed = max(KEPT, GAP_FACTOR * predicted)
                yield Kept(column, side.label, len(off), float(off.mean()), allowed)


def _not_computed(kept: Sequence[Kept]) -> list[Kept]:
    """The worst column of each side none of whose columns is what its engine computed.

    Where both sides are such, the captures are of another run, and nobody kept a wrong score.
    """
    by_side: dict[str, list[Kept]] = {}
    for one in kept:
        by_side.setdefault(one.side, []).append(one)
    wrong = [ks for ks in by_side.values() if not any(k.computed for k in ks)]
    if len(wrong) != 1:
        return []
    return [max(wrong[0], key=lambda k: k.mae)]


def _weighed(culprit: Culprit, found: Verdict, kept: Sequence[Kept]) -> Culprit | None:
    """What a culprit of the scores alone becomes where the captures say what was computed.

    Where A and B are changed alike, scores alone blame C, which differs from both.
    """
    if culprit.operator not in BETWEEN:
        return None if found.culprits else culprit
    mine = [k for k in kept if k.side == culprit.side]
    if not mine or not all(k.computed for k in mine):
        return culprit if mine or not found.culprits else None
    off = _not_computed(kept)
    if not off:
        # both kept what they computed, so what happens inside the engines explains the scores
        return None
    return replace(
        culprit,
        side=off[0].side,
        evidence=(
            *culprit.evidence,
            f"the {culprit.side} kept what it computed, as its capture shows, and the "
            f"{off[0].side} did not: {off[0].column} is off its capture by {off[0].mae:.4g} nat",
        ),
    )


def _of_keeping(kept: Kept) -> Culprit:
    return Culprit(
        layer=None,
        point="logprob",
        operator="logprob",
        side=kept.side,
        share_of_gap=None,
        own_error=kept.mae / kept.allowed,
        floor=1.0,
        where="all response tokens",
        evidence=(
            f"{kept.column} in the record differs from the log-probs captured of the same "
            f"{kept.tokens} tokens on this side by {kept.mae:.4g} nat on average "
            f"({kept.allowed:.4g} would be rounding): it was changed, or is of other tokens or "
            "other weights than the capture",
        ),
    )


def _acquitted(kept: Sequence[Kept]) -> list[RuledOut]:
    return [
        RuledOut(
            f"{k.column} is not what the {k.side} computed",
            f"it is within {k.mae:.2g} nat of the captured log-probs of {k.tokens} tokens",
        )
        for k in kept
        if k.computed
    ]


def _notes(kept: Sequence[Kept], record: ScoreRecord, sides: Sequence[Capture]) -> list[str]:
    notes = []
    seen = {k.side for k in kept}
    for side in sides:
        if side.label not in seen:
            notes.append(
                f"the record's columns of the {side.label} were not held against its capture: no "
                f"raw log-probs of {FEWEST} or more of the record's tokens are in it"
            )
    off = [k for k in kept if not k.computed]
    if off and len({k.side for k in off}) > 1:
        notes.append(
            "neither side's scores in the record are those that were captured: record and captures "
            "are of different runs or weights"
        )
    return notes
