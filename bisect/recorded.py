"""Join what a record of A, B and C says to what two captures say, into one verdict.

A capture holds the log-prob that an engine computed, a record the one that was kept. Where they are
the same, what the record shows is explained by what happens inside the engine, and the captures
tell it better. Where they differ, the fault lies between the two, and no layer is to blame for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike

import numpy as np

from layerbisect.bisect.budget import GAP_FACTOR
from layerbisect.bisect.scores.decision_map import PATHS
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

    ``mae`` is in nats over ``tokens``; ``allowed`` is what rounding explains. ``scaled`` says that
    the record calls the scores those of logits over a temperature; a capture has raw ones.
    """

    column: str
    side: str
    tokens: int
    mae: float
    allowed: float
    scaled: bool = False

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
        LayerBisectError: captures that are not labelled ``rollout`` and ``trainer``, or that hold
            no log-prob of any of the record's tokens.
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
    off = _off(kept)
    if off is not None and off.side not in {c.side for c in scored_culprits}:
        scored_culprits.append(_of_keeping(off))
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
    if not culprits and found.status == "agree":
        reasons = _not_explained(found, scored)
        if scored.status in ("unstable", "inconclusive"):
            return replace(verdict, status=scored.status, reasons=scored.reasons, next=scored.next)
        if reasons:
            return replace(verdict, status="inconclusive", reasons=reasons, next=scored.next)
    return verdict


def _not_explained(found: Verdict, scored: Verdict) -> tuple[str, ...]:
    """Say, in a sentence, that the record's scores differ by more than what was captured does."""
    if scored.status != "divergent" or scored.gap is None or found.gap is None:
        return ()
    predicted = found.rounding_budget.predicted_gap if found.rounding_budget else 0.0
    if scored.gap.mae <= max(GAP_FACTOR * max(predicted, found.gap.mae), KEPT):
        return ()
    return (
        f"the captures agree ({found.gap.mae:.4g} nat), and the record does not: "
        f"{scored.reasons[0]}; no captured operator makes that",
    )


def _kept(record: ScoreRecord, sides: Sequence[Capture], found: Verdict) -> Iterator[Kept]:
    """Hold the record's columns against the captured log-probs of the same tokens."""
    predicted = found.rounding_budget.predicted_gap if found.rounding_budget else 0.0
    captured = [captured_scores(record, side) for side in sides]
    if not any(np.isfinite(found).any() for side in captured for found in side.values()):
        raise LayerBisectError(
            "no response token of the record has a log-prob in either capture; give the record of "
            "the responses that were captured, and capture the point logprob"
        )
    for side, computed, letters in zip(sides, captured, ("AB", "C"), strict=True):
        for column, scoring in record.info.columns.items():
            if column[0] not in letters or not is_score(column) or column == "C.grad":
                continue
            if scoring.definition == "behavior":
                # after filters and penalties, which no capture shows
                continue
            off = np.concatenate(
                [np.abs(call.scores[column] - computed[call.name])[call.mask] for call in record]
            )
            off = off[np.isfinite(off)]
            if len(off) >= FEWEST:
                allowed = max(KEPT, GAP_FACTOR * predicted)
                scaled = scoring.definition == "temperature"
                yield Kept(column, side.label, len(off), float(off.mean()), allowed, scaled)


def _off(kept: Sequence[Kept]) -> Kept | None:
    """The worst column of the one side none of whose columns is what the record calls it.

    None where there is no such side, or where both are: then the captures are of another run, and
    nobody kept a wrong score. Scores over a temperature cannot be computed from a capture, but
    they are not the raw ones, unless the other side's are raw, too: a temperature of 1.
    """
    by_side: dict[str, list[Kept]] = {}
    for one in kept:
        by_side.setdefault(one.side, []).append(one)
    raw = [k for k in kept if k.scaled and k.computed]
    if len({k.side for k in raw}) == 1 and all(k in raw for k in by_side[raw[0].side]):
        others = [k for k in kept if k.side != raw[0].side]
        return raw[0] if others and all(k.scaled for k in others) else None
    wrong = [ks for ks in by_side.values() if not any(k.computed or k.scaled for k in ks)]
    return max(wrong[0], key=lambda k: k.mae) if len(wrong) == 1 else None


def _weighed(culprit: Culprit, found: Verdict, kept: Sequence[Kept]) -> Culprit | None:
    """What a culprit of the scores alone becomes where the captures say what was computed.

    Where A and B are changed alike, scores alone blame C, which differs from both.
    """
    off = _off(kept)
    if culprit.operator is None and culprit.side == "unknown" and off is not None:
        return _moved(replace(culprit, operator="logprob"), off)
    if culprit.operator not in BETWEEN:
        return None if found.culprits else culprit
    mine = _columns(culprit, kept)
    if not mine:
        return None if found.culprits else culprit
    if off is not None and off.side != culprit.side and all(k.computed != k.scaled for k in mine):
        return _moved(culprit, off)
    if all(k.computed and not k.scaled for k in mine):
        # what a side kept as it computed it is explained by what happens inside its engine
        return None
    return _moved(culprit, off) if off is not None and off.side == culprit.side else culprit


def _moved(culprit: Culprit, off: Kept) -> Culprit:
    """The culprit on the side that kept what it had not computed, which may be its own."""
    return replace(culprit, side=off.side, evidence=(*culprit.evidence, _said(off)))


def _said(off: Kept) -> str:
    if off.scaled:
        return (
            f"{off.column} is said to be over a temperature and is within {off.mae:.2g} nat of the "
            f"raw log-probs captured of its {off.tokens} tokens, while the other side's scores are "
            "not its raw ones: the temperature was left out"
        )
    return (
        f"{off.column} in the record differs from the log-probs captured of the same {off.tokens} "
        f"tokens on this side by {off.mae:.4g} nat on average ({off.allowed:.4g} would be "
        "rounding): it was changed, or is of other tokens or other weights than the capture"
    )


def _columns(culprit: Culprit, kept: Sequence[Kept]) -> list[Kept]:
    """The columns that a culprit of the scores is about: A or B of the rollout's, or all of it."""
    mine = [k for k in kept if k.side == culprit.side]
    letters = [letter for letter, path in PATHS.items() if path in culprit.where]
    return [k for k in mine if k.column[0] in letters] or mine


def _of_keeping(off: Kept) -> Culprit:
    return Culprit(
        layer=None,
        point="logprob",
        operator="logprob",
        side=off.side,
        share_of_gap=None,
        own_error=off.mae / off.allowed,
        floor=1.0,
        where="all response tokens",
        evidence=(_said(off),),
    )


def _acquitted(kept: Sequence[Kept]) -> list[RuledOut]:
    return [
        RuledOut(
            f"{k.column} was changed after the {k.side} had computed it",
            f"it is within {k.mae:.2g} nat of the captured log-probs of {k.tokens} tokens",
        )
        for k in kept
        if k.computed and not k.scaled
    ]


def _notes(kept: Sequence[Kept], record: ScoreRecord, sides: Sequence[Capture]) -> list[str]:
    notes = []
    seen = {k.side for k in kept}
    for side in sides:
        if side.label not in seen:
            notes.append(
                f"the record's columns of the {side.label} were not held against its capture, "
                f"which has log-probs of fewer than {FEWEST} of the record's tokens"
            )
    sides_off = {k.side for k in kept if not k.computed and not k.scaled}
    sides_off -= {k.side for k in kept if k.computed}
    if len(sides_off) > 1:
        notes.append(
            "neither side's scores in the record are those that were captured: record and captures "
            "are of different runs or weights"
        )
    return notes
