"""Weigh the evidence: agree, divergent, unstable or inconclusive, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerbisect.bisect.budget import GAP_FACTOR
from layerbisect.bisect.evidence import Evidence
from layerbisect.bisect.side_culprits import EMBEDDED, is_everywhere
from layerbisect.bisect.verdict import Culprit, Status

GAP_DEVIATIONS = 3.0
"""A gap must be beyond that by this many of its standard errors."""
STANDING_OUT = 0.3
"""A layer whose share of the gap is above this, where nothing is convicted, is named for it."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A status, the sentences that say why, and the culprits.

    ``other_model`` says that the model directory is not what both sides ran.
    """

    status: Status
    reasons: tuple[str, ...]
    culprits: tuple[Culprit, ...] = ()
    other_model: bool = False


def weigh(evidence: Evidence) -> Judgement:
    """Judge a case in which everything could be measured."""
    gap, culprits = evidence.gap, evidence.findings.culprits
    misfit = _misfit(evidence)
    # what both sides share does not hide what one side does alone, unless it is everywhere
    if misfit and (not culprits or _shared_everywhere(evidence)):
        return Judgement("inconclusive", (misfit,), other_model=True)
    if gap.nonfinite:
        return Judgement(
            "inconclusive",
            (
                f"{gap.nonfinite} of {gap.nonfinite + gap.rows} pairs of log-probs are not finite; "
                "capture raw log-probs, before any filter of the sampler, or look at the head "
                "where they are NaN",
            ),
        )
    if culprits:
        names = "an operator errs" if len(culprits) == 1 else f"{len(culprits)} operators err"
        reason = f"{names} beyond rounding"
        if all(culprit.operator == "weights" for culprit in culprits):
            reason = "a side runs other weights"
        return Judgement("divergent", (reason,), culprits)
    if not gap.rows:
        return Judgement(
            "inconclusive",
            (
                "no log-prob and no layer boundary is in both captures, so there is no gap to "
                "explain; capture the points coarse, too",
            ),
        )
    judgement = _weigh_gap(evidence)
    routing = evidence.routing
    unexplained = routing.causes["unexplained"] if routing is not None else 0
    if judgement.status == "agree" and routing is not None and unexplained:
        return Judgement(
            "inconclusive",
            (
                f"{unexplained} of {routing.flips} routes that differ are unexplained, "
                "and no operator is convicted of them, so the sides do not agree; capture "
                "mlp.norm, mlp.router_logits and mlp.expert_ids of more tokens on both sides",
            ),
        )
    return judgement


def _weigh_gap(evidence: Evidence) -> Judgement:
    gap, predicted = evidence.gap, evidence.budget.predicted_gap
    if evidence.repeat is not None and 0 < gap.mae <= evidence.repeat:
        return Judgement(
            "unstable",
            (
                f"the gap of {gap.mae:.4g} nat is no larger than what one engine differs from "
                f"itself by on the same tokens ({evidence.repeat:.4g} nat); make it repeat first "
                "(deterministic mode, fixed batches)",
            ),
        )
    if not math.isfinite(predicted):
        return Judgement(
            "inconclusive",
            ("no token follows another in both captures, so rounding's share cannot be predicted",),
        )
    allowed = GAP_FACTOR * evidence.freedom * predicted
    if gap.mae <= allowed:
        return Judgement(
            "agree",
            (
                f"the gap of {gap.mae:.4g} nat is rounding: {predicted:.4g} nat is predicted for "
                "this model in this dtype",
            ),
        )
    if gap.mae - GAP_DEVIATIONS * evidence.gap_error <= allowed:
        return Judgement(
            "agree",
            (
                f"the gap of {gap.mae:.4g} nat is within what rounding makes on {gap.rows} tokens: "
                f"{predicted:.4g} nat is predicted, and the gap's standard error is "
                f"{evidence.gap_error:.2g}",
            ),
        )
    beyond = (
        f"the gap of {gap.mae:.4g} nat is beyond rounding ({predicted:.4g} nat predicted), and no "
        "operator that was captured errs"
    )
    suspect = _standing_out(evidence)
    if suspect is None:
        return Judgement("divergent", (f"{beyond}; no single layer makes it",))
    return Judgement("divergent", (beyond,), (suspect,))


def _shared_everywhere(evidence: Evidence) -> bool:
    alike = evidence.findings.alike
    judged = {e.layer for found in evidence.errors.values() for e in found} - {None}
    wrong = {e.layer for e in alike} - {None}
    return is_everywhere(len(wrong), len(evidence.layers)) or (bool(wrong) and wrong == judged)


def _misfit(evidence: Evidence) -> str | None:
    """Say, in a sentence, when the model directory is not what both sides ran."""
    alike = evidence.findings.alike
    if not alike:
        return None
    shared = evidence.weights.shared
    if shared:
        how = f"{len(shared)} of its tensors, such as {shared[0]}, are other than both ran"
    elif _shared_everywhere(evidence) or any(e.layer is None for e in alike):
        first = alike[0]
        how = f"both differ from it in the same way in {first.operator} at {first.point}" + (
            f" and {len(alike) - 1} more operators" if len(alike) > 1 else ""
        )
    else:
        return None
    return (
        "the model directory does not hold the weights or the settings that both sides ran (a "
        f"temperature is one): {how}; give --model the checkpoint in use, and capture raw scores"
    )


def _standing_out(evidence: Evidence) -> Culprit | None:
    """Name the layer that makes most of a gap that no operator's own error explains."""
    shares = {
        layer: share
        for layer, share in evidence.shares.items()
        if share is not None and share > STANDING_OUT and layer != EMBEDDED
    }
    if not shares:
        return None
    layer = max(shares, key=lambda name: shares[name])
    budget = evidence.budget
    far = [
        label
        for label, distance in budget.distances.items()
        if distance > GAP_FACTOR * evidence.freedom * max(budget.whole, 1e-12)
    ]
    own = [e.ratio for found in evidence.errors.values() for e in found if e.layer == layer]
    return Culprit(
        layer=layer,
        point="logprob" if layer is None else f"layers.{layer}",
        operator=None,
        side=far[0] if len(far) == 1 else "unknown",
        share_of_gap=shares[layer],
        own_error=max(own, default=float("nan")),
        floor=1.0,
        where="all rows",
        evidence=(
            f"{shares[layer]:.0%} of the gap is made here, and no captured operator in it errs "
            "beyond rounding on its own input",
        ),
    )
