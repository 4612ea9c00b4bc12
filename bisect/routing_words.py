"""What the evidence about routing adds to a culprit that is a router."""

from __future__ import annotations

from dataclasses import replace

from layerbisect.bisect.routing_report import Explained, Routing
from layerbisect.bisect.verdict import Culprit


def with_routes(culprit: Culprit, routing: Routing | None) -> Culprit:
    """Say of a router whether its logits are wrong or what it chose by them, and of how much."""
    if routing is None:
        return culprit
    told = [
        (one, one.explained)
        for one in routing.layers
        if one.explained is not None and culprit.layer in (None, one.layer)
    ]
    if not told:
        return culprit
    rows = sum(one.rows for one, _ in told)
    flips = sum(one.flips for one, _ in told)
    explained = [why for _, why in told]
    said = None
    if culprit.point.endswith(".mlp.expert_ids"):
        said = _selection(culprit, explained, rows, flips)
    elif culprit.point.endswith(".mlp.router_logits"):
        made = sum(why.by_router for why in explained)
        said = (
            f"{culprit.point}: {made} of {flips} routes that differ are the router's doing: from "
            "what each side's router read, both would choose the same experts"
        )
    return culprit if said is None else replace(culprit, evidence=(said, *culprit.evidence))


def _selection(culprit: Culprit, explained: list[Explained], rows: int, flips: int) -> str:
    sides = [label for label in explained[0].astray if culprit.side in (label, "both")]
    astray = sum(why.astray[label] for why in explained for label in sides)
    same = sum(why.same_logits for why in explained)
    return (
        f"{culprit.point}: the selection, not the router's logits: in {astray} of "
        f"{rows * len(sides)} rows the experts chosen are not those with the largest of this "
        f"side's own logits; in {same} of {flips} routes that differ both sides' logits would "
        "choose the same experts"
    )
