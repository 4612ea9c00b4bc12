"""What to do next, after a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layerbisect.bisect.case import Case
from layerbisect.bisect.verdict import Culprit
from layerbisect.bisect.weigh import Judgement
from layerbisect.bisect.weight_evidence import WeightEvidence
from layerbisect.kernels.judging.own_error import OwnError

REPLAYED = (
    "norm",
    "linear",
    "rope",
    "attention",
    "router",
    "experts",
    "combine",
    "residual",
    "head",
)
"""The verdict's words for operators that can be replayed."""


def next_step(
    case: Case,
    judgement: Judgement,
    weights: WeightEvidence | None,
    errors: Mapping[str, Sequence[OwnError]],
) -> str:
    """Say in a sentence what to run or to look at next.

    ``weights`` is None where they were not compared; ``errors`` are the own errors by side.
    """
    again = f"`layerbisect bisect ROLLOUT TRAINER --model {case.directory}`"
    culprits = judgement.culprits
    if culprits and weights is not None and weights.behind(culprits[0]):
        return _which_weights(culprits[0], weights)
    unseen = sorted({c.layer for c in culprits if c.operator is None and c.layer is not None})
    if culprits and culprits[0].operator is None and not case.unseen_inside():
        return _look(case, culprits[0])
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
        return _replay(case, culprits[0], errors) or (
            f"look at {culprits[0].operator} in the code of the {culprits[0].side} side"
        )
    if judgement.status == "divergent":
        return f"capture both sides again with points all, then {again}"
    rollout, trainer = (side.capture.directory for side in case.sides)
    if judgement.other_model:
        return (
            f"`layerbisect bisect {rollout} {trainer} --model CHECKPOINT`, with the checkpoint "
            "that both sides ran"
        )
    return f"`layerbisect show {rollout}` and `layerbisect show {trainer}`"


def _look(case: Case, culprit: Culprit) -> str:
    """Say where to look where no further point can tell the operator."""
    look = f"look at what makes {culprit.point} in the code of the {culprit.side} side"
    if culprit.side in ("both", "unknown"):
        look = f"look at what makes {culprit.point} in the code of both sides"
    if culprit.layer is None:
        return look
    side = next((s for s in case.sides if s.label == culprit.side), case.sides[0])
    command = f"layerbisect replay {side.capture.directory} --model {case.directory}"
    return f"`{command} --layer {culprit.layer}`, then {look}"


def _replay(case: Case, culprit: Culprit, errors: Mapping[str, Sequence[OwnError]]) -> str:
    """Name the command that replays what a culprit was convicted of; empty where none can."""
    side = next((s for s in case.sides if s.label == culprit.side), case.sides[0])
    # an operator that errs in most layers has no layer: the first of them shows it
    layers = [
        e.layer
        for e in errors.get(side.label, ())
        if e.convicted
        and e.operator == culprit.operator
        and (culprit.layer in (None, e.layer))
        and (e.layer is None) == (not culprit.point.startswith("layers."))
    ]
    if culprit.operator not in REPLAYED or not layers:
        return ""
    place = "" if layers[0] is None else f" --layer {layers[0]}"
    command = f"layerbisect replay {side.capture.directory} --model {case.directory}{place}"
    command = f"`{command} --operator {culprit.operator}"
    if case.sides[0].capture.directory == case.sides[1].capture.directory:
        return f"{command} --requests PATTERN`, with the sequences of the {side.label} side"
    return f"{command}`"


def _which_weights(culprit: Culprit, weights: WeightEvidence | None) -> str:
    side = "both sides" if culprit.side == "both" else f"the {culprit.side} side"
    if weights is not None and any(
        names for label, names in weights.torn.items() if culprit.side in (label, "both")
    ):
        return f"find out which weights each rank of {side} loaded, and when"
    return f"find out which weights {side} loaded, and when"
