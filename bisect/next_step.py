"""What to do next, after a verdict."""

from __future__ import annotations

from layerbisect.bisect.case import Case
from layerbisect.bisect.verdict import Culprit
from layerbisect.bisect.weigh import Judgement
from layerbisect.bisect.weight_evidence import WeightEvidence


def next_step(case: Case, judgement: Judgement, weights: WeightEvidence | None) -> str:
    """Say in a sentence what to run or to look at next; ``weights`` where they were compared."""
    again = f"`layerbisect bisect ROLLOUT TRAINER --model {case.directory}`"
    culprits = judgement.culprits
    if culprits and weights is not None and weights.behind(culprits[0]):
        return _which_weights(culprits[0], weights)
    unseen = sorted({c.layer for c in culprits if c.operator is None and c.layer is not None})
    if unseen:
        points = ",".join(f"layers.{layer}" for layer in unseen)
        return f"capture both sides again with points {points},logprob, then {again}"
    if judgement.status == "agree":
        for side in case.sides:
            if not side.capture.finished:
                return (
                    f"the {side.label} capture is not whole ({side.capture.problems[0]}): "
                    f"capture it again to see what it lacks, then {again}"
                )
            if not len(side.capture.scores.logprob):
                return f"to judge the head, capture the {side.label} with logprob, then {again}"
        if case.unseen_inside():
            return f"to see each operator alone, capture both sides with points all, then {again}"
        return "nothing to do; the rounding budget says which operator to raise to float32"
    if culprits and culprits[0].operator == "weights":
        return _which_weights(culprits[0], weights)
    if culprits and culprits[0].operator is not None:
        return f"look at {culprits[0].operator} in the code of the {culprits[0].side} side"
    if judgement.status == "divergent":
        return f"capture both sides again with points all, then {again}"
    rollout, trainer = (side.capture.directory for side in case.sides)
    return f"`layerbisect show {rollout}` and `layerbisect show {trainer}`"


def _which_weights(culprit: Culprit, weights: WeightEvidence | None) -> str:
    side = "both sides" if culprit.side == "both" else f"the {culprit.side} side"
    if weights is not None and any(
        names for label, names in weights.torn.items() if culprit.side in (label, "both")
    ):
        return f"find out which weights each rank of {side} loaded, and when"
    return f"find out which weights {side} loaded, and when"
