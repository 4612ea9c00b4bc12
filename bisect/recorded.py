"""Join what a record of A, B and C says to what two captures say, into one verdict.

A capture holds the log-prob that an engine computed, a record the one that was kept. Where they are
the same, what the record shows is explained by what happens inside the engine, and the captures
tell it better. Where they differ, the fault lies between the two, and no layer is to blame for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike

import numpy as np

from layerbisect.bisect.budget import GAP_FACTOR
from layerbisect.bisect.kept_scores import (
    FEWEST,
    KEPT,
    Computed,
    Kept,
    hold_against_captures,
    kept_otherwise,
)
from layerbisect.bisect.scores.decision_map import PATHS
from layerbisect.bisect.scores.judge import judge
from layerbisect.bisect.verdict import Culprit, RuledOut, Verdict
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.record.captured import captured_scores
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.store import Capture

BETWEEN = ("logprob", "inputs")
"""Operators between an engine's log-probs and the record."""


def open_record(
    record: ScoreRecord | str | PathLike[str], sides: Sequence[Capture]
) -> tuple[ScoreRecord, Computed]:
    """Open a record of what was captured on ``sides``, and look its tokens up there.

    Raises:
        LayerBisectError: captures that are not labelled ``rollout`` and ``trainer``, or that hold
            no log-prob of any of the record's tokens.
        RecordError: no record there.
        TrainerError: a call whose positions do not count its tokens.
    """
    labels = tuple(side.label for side in sides)
    if labels != ("rollout", "trainer"):
        raise LayerBisectError(
            f"a record has scores of a rollout and a trainer, and the captures are labelled "
            f"{' and '.join(labels)}; give the record where the rollout's capture is compared with "
            "the trainer's"
        )
    opened = record if isinstance(record, ScoreRecord) else ScoreRecord.open(record)
    computed = [captured_scores(opened, side) for side in sides]
    if not any(np.isfinite(scores).any() for side in computed for scores in side.values()):
        raise LayerBisectError(
            "no response token of the record has a log-prob in either capture; give the record of "
            "the responses that were captured, and capture the point logprob"
        )
    return opened, computed


def with_record(
    found: Verdict, record: ScoreRecord, computed: Computed, sides: Sequence[Capture]
) -> Verdict:
    """Add to a verdict on two captures what a record of the same run says.

    Args:
        found: the verdict on ``sides``, the rollout's capture and the trainer's.
        record: at least two of A, B and C of the responses that were captured.
        computed: what :func:`open_record` found in the captures.

    Raises:
        RecordError: a record that cannot be judged.
    """
    scored = judge([record])
    kept = tuple(hold_against_captures(record, computed, sides, _predicted(found)))
    scored_culprits = [w for c in scored.culprits if (w := _weighed(c, found, kept)) is not None]
    off = kept_otherwise(kept)
    if off is not None and off.side not in {c.side for c in scored_culprits}:
        scored_culprits.append(_of_keeping(off))
    culprits = (*found.culprits, *_merged(scored_culprits))
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
        if scored.status in ("unstable", "inconclusive"):
            return replace(verdict, status=scored.status, reasons=scored.reasons, next=scored.next)
        if said := _not_explained(found, scored):
            return replace(verdict, status="inconclusive", reasons=(said,), next=scored.next)
    return verdict


def _merged(culprits: Sequence[Culprit]) -> list[Culprit]:
    """One culprit a side and operator, with all that convicts it."""
    found: dict[tuple[str | None, str], Culprit] = {}
    for one in culprits:
        before = found.setdefault((one.operator, one.side), one)
        if before is not one:
            more = tuple(line for line in one.evidence if line not in before.evidence)
            found[one.operator, one.side] = replace(before, evidence=(*before.evidence, *more))
    return list(found.values())


def _not_explained(found: Verdict, scored: Verdict) -> str:
    """Say, in a sentence or "", that the record's scores differ by more than the captured do."""
    if scored.status != "divergent" or scored.scores is None or found.gap is None:
        return ""
    largest = max(pair.gap.mae for pair in scored.scores.between)
    if largest <= max(GAP_FACTOR * max(_predicted(found) or 0.0, found.gap.mae), KEPT):
        return ""
    return (
        f"the captures agree ({found.gap.mae:.4g} nat), and the record does not: "
        f"{scored.reasons[0]}; no captured operator makes that"
    )


def _predicted(found: Verdict) -> float | None:
    """What gap (nat) rounding makes, None where that is not known."""
    budget = found.rounding_budget
    return budget.predicted_gap if budget and math.isfinite(budget.predicted_gap) else None


def _weighed(culprit: Culprit, found: Verdict, kept: Sequence[Kept]) -> Culprit | None:
    """What a culprit of the scores alone becomes where the captures say what was computed.

    Where A and B are changed alike, scores alone blame C, which differs from both.
    """
    off = kept_otherwise(kept)
    if culprit.operator is None and culprit.side == "unknown" and off is not None:
        return _moved(replace(culprit, operator="logprob"), off)
    if culprit.operator not in BETWEEN:
        return None if found.culprits else culprit
    mine = _columns(culprit, kept)
    inexact = {k.side for k in kept if k.mae > KEPT}
    if culprit.side == "unknown" and not found.culprits and len(inexact) == 1:
        # scores cannot tell whose it is; all of the other side are copies of what it computed
        return replace(culprit, side=inexact.pop())
    if not mine:
        return None if found.culprits else culprit
    if off is not None and off.side != culprit.side and all(k.computed != k.scaled for k in mine):
        return _moved(culprit, off)
    if all((k.computed if found.culprits else k.mae <= KEPT) and not k.scaled for k in mine):
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
                f"the record's columns of the {side.label} were not held against its capture: it "
                f"has log-probs of fewer than {FEWEST} of the record's tokens, they are defined "
                "otherwise than raw, or what rounding makes is not known"
            )
    off = {k.side for k in kept if k.far and not k.scaled}
    off -= {k.side for k in kept if not k.far}
    if len(off) > 1:
        notes.append(
            "neither side's scores in the record are those that were captured: record and captures "
            "are of different runs or weights"
        )
    return notes
