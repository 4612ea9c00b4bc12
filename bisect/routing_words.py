"""What the evidence about routing adds to a culprit that is a router."""

from __future__ import annotations

from dataclasses import replace

from layerbisect.bisect.routing_report import Explained, Routing
from layerbisect.bisect.verdict import Culprit


def with_routes(culprit: Culprit, routing: Routing | None) -> Culprit:
    """Say of a router whether its logits are wrong or what it chose by them, and of how much.

    Nothing is said of logits, or of what a router read, that a capture does not hold.
    """
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
        said = _logits(culprit, explained, flips)
    return culprit if said is None else replace(culprit, evidence=(said, *culprit.evidence))


def _logits(culprit: Culprit, explained: list[Explained], flips: int) -> str:
    if _lacking(explained, "mlp.norm"):
        return _not_known(culprit, flips, ("mlp.norm",))
    made = sum(why.by_router for why in explained)
    return (
        f"{culprit.point}: {made} of {flips} routes that differ are the router's doing: from "
        "what each side's router read, both would choose the same experts"
    )


def _selection(culprit: Culprit, explained: list[Explained], rows: int, flips: int) -> str:
    labels = list(explained[0].lacking)
    sides = [label for label in labels if culprit.side in (label, "both")]
    unread, unseen = (
        {label for label in labels if any(name in why.lacking[label] for why in explained)}
        for name in ("mlp.norm", "mlp.router_logits")
    )
    if unread & unseen & set(sides):
        return _not_known(culprit, flips, ("mlp.norm", "mlp.router_logits"))
    astray = sum(why.astray[label] for why in explained for label in sides)
    of = f"in {astray} of {rows * len(sides)} rows the experts chosen are not those"
    if unseen & set(sides):
        return (
            f"{culprit.point}: the router, its logits or the selection by them: {of} that follow "
            "from what it read; capture mlp.router_logits to tell which"
        )
    said = (
        f"{culprit.point}: the selection, not the router's logits: {of} with the largest of this "
        "side's own logits"
    )
    if unseen:
        return said
    same = sum(why.same_logits for why in explained)
    return (
        f"{said}; in {same} of {flips} routes that differ both sides' logits would choose the same "
        "experts"
    )


def _lacking(explained: list[Explained], name: str) -> bool:
    return any(name in names for why in explained for names in why.lacking.values())


def _not_known(culprit: Culprit, flips: int, names: tuple[str, ...]) -> str:
    return (
        f"{culprit.point}: whether the router made the {flips} routes that differ, or what comes "
        f"before it in the layer, is not known; capture {' and '.join(names)} on both sides"
    )
