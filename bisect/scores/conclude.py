"""From measured scores to a verdict: what stands apart, whose it is, and what was ruled out."""

from __future__ import annotations

from collections.abc import Sequence

from layerbisect.bisect.scores.conditions import stale
from layerbisect.bisect.scores.decision_map import CHANCE, CLEAR, PATHS, SIDES, Shape, shapes
from layerbisect.bisect.scores.explain import (
    FEWEST,
    Judged,
    chance,
    coverage,
    reasons,
    ruled_out,
    said,
)
from layerbisect.bisect.scores.next_step import next_step
from layerbisect.bisect.scores.report import PairReport, ScoreReport, StepReport
from layerbisect.bisect.shapes.table import PAIRING, PLACES
from layerbisect.bisect.verdict import Culprit, Status, Verdict


def conclude(judged: Judged, before: Sequence[StepReport], step: int | None) -> Verdict:
    """Conclude one step; ``before`` are the steps that were judged already."""
    scores, standing = judged.scores, judged.standing
    convicting = shapes(scores.findings, standing.letter, scores.tolerance, scores.floors)
    moved = scores.unrepeated
    weights = stale(judged.weights(), judged.versions(), before, step, standing)
    culprits = [] if weights is None else [_of_weights(*weights, judged)]
    # what other weights do to scores may look like a shape of the trainer's
    culprits += [_of_shape(s, judged) for s in convicting if weights is None or s.letter == "A"]
    path = _of_path(judged, convicting, bool(weights))
    if path is not None:
        culprits.append(path)
    gradient = _of_gradient(judged)
    if gradient is not None:
        culprits.append(gradient)
    status: Status = "agree"
    if scores.tokens < FEWEST or judged.unlike and (standing.apart or culprits or moved):
        status, culprits = "inconclusive", []
    elif culprits:
        status = "divergent"
    elif standing.hidden or _unrepeatable(scores):
        status = "unstable"
    elif standing.apart:
        status = "divergent"
    gap = _main(scores).gap
    return Verdict(
        status=status,
        gap=gap,
        culprits=tuple(culprits),
        ruled_out=ruled_out(judged, convicting),
        rounding_budget=None,
        coverage=coverage(judged),
        next=next_step(status, culprits, standing, moved, judged.columns),
        reasons=reasons(status, judged, culprits, before, step),
        scores=scores,
    )


def _unrepeatable(scores: ScoreReport) -> bool:
    """Whether repeats differ as much as anything else does, or any token by far too much."""
    moved = scores.unrepeated
    if any(report.max > _FAR * report.tolerance for report in moved):
        return True
    floors = scores.floors
    return bool(moved) and any(
        0 < floors.get(p.name, 0.0) and p.gap.mae <= CLEAR * floors[p.name] for p in scores.pairs
    )


def _main(scores: ScoreReport) -> PairReport:
    """A-C where both are there, else the one gap between engines or paths that is."""
    best = next((p for p in scores.pairs if p.first == "A" and p.second[0] == "C"), None)
    return best or scores.between[-1]


_FAR = 10.0
"""Times the tolerance of repeats: one token that moves so far is enough."""

DECODE = 0.06
"""Mean difference (nat) that decode and prefill of one sound engine may have: on SmolLM2-135M
in bfloat16 it is about 0.03 to 0.04 (docs/smollm2.md)."""

_ALONE = 8.0
_LARGE = 0.1

# what scores cannot tell from a fault of C
_ALIKE = "A and B agree with each other: what changes both of them alike would look the same"


def _of_shape(shape: Shape, judged: Judged) -> Culprit:
    found, letter = shape.finding, shape.letter
    operator = None
    side = "unknown" if letter is None else SIDES[letter]
    path = "" if letter is None else PATHS[letter]
    if found.test not in PLACES:
        operator = "inputs" if found.test in PAIRING else "logprob"
    elif letter == "C":
        # A and B share weights and engine: what computes both otherwise than C may be at fault
        side, path = "unknown", f"{path}, or of A and B alike"
    return Culprit(
        layer=None,
        point="logprob",
        operator=operator,
        side=side,
        share_of_gap=found.explains,
        own_error=_times(found.mae, judged),
        floor=1.0,
        where=" of ".join(part for part in (found.where or "all response tokens", path) if part),
        evidence=(
            f"{found.test}: {found.summary}",
            *found.evidence,
            f"seen in {found.pair}; chance of a false alarm {chance(found.false_alarm)}",
            *([_ALIKE] if letter == "C" and operator else []),
        ),
    )


def _times(mae: float, judged: Judged) -> float:
    """How many times the gap between the two columns that agree."""
    rest = judged.standing.rest
    return mae / rest.gap.mae if rest is not None and rest.gap.mae else float("nan")


def _of_weights(side: str, evidence: tuple[str, ...], judged: Judged) -> Culprit:
    worst = max(judged.standing.apart, key=lambda pair: pair.gap.mae)
    return Culprit(
        layer=None,
        point="weights",
        operator="weights",
        side=side,
        share_of_gap=None,
        own_error=_times(worst.gap.mae, judged),
        floor=1.0,
        where="all response tokens",
        evidence=evidence,
    )


def _of_path(judged: Judged, shaped: Sequence[Shape], stale_weights: bool) -> Culprit | None:
    """A or B that differs from both others, without a shape: its path is as far as scores see.

    C that differs so is no culprit: rollout's weights, the trainer's and its forward make the same.
    """
    letter, rest = judged.standing.letter, judged.standing.rest
    if letter is None or letter == "C" or rest is None or stale_weights:
        return None
    if any(shape.letter in (letter, None) for shape in shaped):
        return None
    mine = [p for p in judged.standing.apart if letter in (p.first[0], p.second[0])]
    least = min(p.gap.mae for p in mine)
    # beyond what decode rounds, and beyond doubt or far beyond what the two others differ by
    large = least > _LARGE or least > DECODE and least > _ALONE * rest.gap.mae
    if judged.standing.chance > CHANCE or not large:
        return None
    return Culprit(
        layer=None,
        point="logprob",
        operator=None,
        side=SIDES[letter],
        share_of_gap=None,
        own_error=_times(min(p.gap.mae for p in mine), judged),
        floor=1.0,
        where=PATHS[letter],
        evidence=(
            f"{' and '.join(said(p) for p in mine)}, while {said(rest)}",
            f"the odd one nearly everywhere; by chance {chance(judged.standing.chance)}",
            "no shape convicts",
        ),
    )


def _of_gradient(judged: Judged) -> Culprit | None:
    scores = judged.scores
    pair = scores.gradient
    if pair is None or pair.gap.mae <= max(
        scores.tolerance, CLEAR * max((r.mae for r in scores.repeats if r.letter == "C"), default=0)
    ):
        return None
    return Culprit(
        layer=None,
        point="logprob",
        operator=None,
        side="trainer",
        share_of_gap=None,
        own_error=float("nan"),
        floor=1.0,
        where="the gradient-enabled forward (C.grad)",
        evidence=(f"{said(pair)}: dropout, recomputation or routing differ from the frozen C",),
    )
