"""From own errors to culprits: one culprit a fault, with its side and where it sits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from layerbisect.bisect.alike import err_alike
from layerbisect.bisect.replicas import Copies, read_rest
from layerbisect.bisect.side import Side
from layerbisect.bisect.side_culprits import Shares, SideCulprits
from layerbisect.bisect.verdict import Culprit, RuledOut
from layerbisect.bisect.weight_evidence import WeightEvidence
from layerbisect.kernels.judging.own_error import OwnError


@dataclass(frozen=True, slots=True)
class Findings:
    """Culprits on either side, and what both sides do alike, which makes no gap between them."""

    culprits: tuple[Culprit, ...]
    alike: tuple[OwnError, ...]
    ruled_out: tuple[RuledOut, ...]


def convict(
    errors: Mapping[str, Sequence[OwnError]],
    sides: tuple[Side, Side],
    shares: Shares,
    weights: WeightEvidence,
) -> Findings:
    """Name the culprits among both sides' own errors.

    An operator that errs alike on both sides is set apart. Where ranks of a side hold differing
    copies of a point, that is a culprit, and what is judged on them is none.
    """
    read_rest(sides)
    first, second = ([e for e in errors[side.label] if e.convicted] for side in sides)
    alike = [e for e in first if any(err_alike(e, other) for other in second)]
    alike_points = {e.point for e in alike}
    culprits: list[Culprit] = []
    for side, found in zip(sides, (first, second), strict=True):
        own = [e for e in found if e.point not in alike_points]
        judged, copies = errors[side.label], Copies(side)
        following = copies.judged_on(own)
        owners = weights.owners(side.label)
        # of wrong weights, what they make err is evidence
        after = [
            e
            for root, found_on in following.items()
            for e in found_on
            if e.point != root or (e.layer, e.operator) not in owners
        ]
        alone = [e for e in own if e not in after]
        named = SideCulprits(judged, side, shares, weights).name(alone)
        culprits += copies.accuse(named, following, judged, shares, weights)
    culprits = _both_sides(culprits)
    culprits.sort(key=_order)
    ruled_out = [
        RuledOut(
            f"{e.operator} at {e.point}",
            f"both sides compute it alike, {e.ratio:.1f}x rounding from the model directory's "
            "reference, so it makes no gap between them",
        )
        for e in alike[:5]
    ]
    ruled_out += [r for side in sides for r in _acquittals(errors[side.label], side.label)]
    return Findings(tuple(culprits), tuple(alike), tuple(ruled_out))


def _order(culprit: Culprit) -> tuple[float, float]:
    own = culprit.own_error
    return -(culprit.share_of_gap or 0.0), 0.0 if math.isnan(own) else -own


def _acquittals(errors: Sequence[OwnError], label: str) -> list[RuledOut]:
    """Say once for each reason what was acquitted, and where."""
    reasons: dict[tuple[str, str], set[int | None]] = {}
    for error in errors:
        if error.acquitted:
            reasons.setdefault((error.operator, error.acquitted), set()).add(error.layer)
    return [
        RuledOut(f"{operator} on the {label} side, {len(layers)} layers", why)
        for (operator, why), layers in reasons.items()
    ]


def _both_sides(culprits: Sequence[Culprit]) -> list[Culprit]:
    """Two sides that err at one operator, each in its own way, are one culprit of both."""
    merged: dict[tuple[int | None, str | None, str], Culprit] = {}
    for culprit in culprits:
        key = (culprit.layer, culprit.operator, culprit.point)
        other = merged.get(key)
        if other is None:
            merged[key] = culprit
        else:
            evidence = tuple(f"{c.side}: {line}" for c in (other, culprit) for line in c.evidence)
            worst = max(other, culprit, key=lambda c: c.own_error)
            merged[key] = replace(worst, side="both", evidence=evidence)
    return list(merged.values())
