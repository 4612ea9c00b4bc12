"""Evidence about routing: which tokens the two sides send to other experts, and why.

Sets of experts first, then weights, then order. That two sides choose other experts for a token is
no fault by itself: where two experts are within rounding of each other, either is right. So each
flip is explained from both sides' router logits, or is not.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from layerbisect.bisect.case import Case
from layerbisect.bisect.metrics import point_difference
from layerbisect.bisect.routing_causes import Guilty, explain
from layerbisect.bisect.routing_flips import (
    by_expert,
    overlap,
    rerouted_so_far,
    shared_weights_differ,
)
from layerbisect.bisect.routing_noise import predicted_noise
from layerbisect.bisect.routing_report import Explained, Group, LayerRouting, RouteGap, Routing
from layerbisect.bisect.selection import expert_sets
from layerbisect.bisect.side import Side
from layerbisect.captures.points import boundary


def compare_routes(case: Case, convicted: Collection[str]) -> Routing | None:
    """Compare the routes of both sides in every layer of which both show the experts' numbers.

    ``convicted`` are the points at which a side errs, and not both alike. None where no layer
    shows its experts on both sides.
    """
    flips: dict[int, torch.Tensor] = {}
    for layer in case.model.config.moe_layers:
        sets = _sets(case, layer)
        if sets is not None:
            flips[layer] = (sets[0] != sets[1]).any(1)
    if not flips:
        return None
    forced = tuple(side.label for side in case.sides if side.forced)
    fresh = case.sides[0].fresh
    flipping = [layer for layer, flipped in flips.items() if bool(flipped[fresh].any())]
    noise: dict[int, float] = {}
    if flipping and not forced:
        case.progress.start("routing", max(flipping) + 1)
        noise = predicted_noise(case.model, case.sides, flipping, case.progress.advance)
    found = []
    before = torch.zeros(len(case.joined.chains.row), dtype=torch.bool)
    for layer, flipped in flips.items():
        rows = fresh[flipped[fresh]]
        told = None
        if len(rows) and not forced:
            guilty = Guilty(
                logits=f"layers.{layer}.mlp.router_logits" in convicted,
                selection=f"layers.{layer}.mlp.expert_ids" in convicted,
            )
            told = explain(case, layer, rows, before, guilty=guilty, predicted=noise.get(layer))
        found.append(_layer(case, layer, flipped, before, told))
        before = before | flipped
    return Routing(tuple(found), _gaps(case.sides, before), forced)


def _sets(case: Case, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both sides' sets of experts, bool [flat, expert], or None where a side does not show them."""
    first, second = (side.read(f"layers.{layer}.mlp.expert_ids") for side in case.sides)
    if first is None or second is None:
        return None
    experts = case.model.config.experts
    return expert_sets(first, experts), expert_sets(second, experts)


def _layer(
    case: Case, layer: int, flipped: torch.Tensor, before: torch.Tensor, told: Explained | None
) -> LayerRouting:
    sets = _sets(case, layer)
    assert sets is not None
    rows = case.sides[0].fresh
    first, second = (one[rows] for one in sets)
    differ = _weights_differ(case, layer, first, second)
    so_far = (before | flipped)[rows]
    return LayerRouting(
        layer=layer,
        rows=len(rows),
        flips=int(flipped[rows].sum()),
        first=int((flipped & ~before)[rows].sum()),
        overlap=float(overlap(first, second).mean()),
        explained=told,
        weights_mean=float(differ.mean()) if differ is not None and len(differ) else None,
        weights_max=float(differ.max()) if differ is not None and len(differ) else None,
        order=_order_differs(case, layer, ~flipped[rows]),
        stream_same=_stream_differs(case, layer, rows[~so_far]),
        stream_rerouted=_stream_differs(case, layer, rows[so_far]),
    )


def _weights_differ(
    case: Case, layer: int, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor | None:
    rows = case.sides[0].fresh
    weights = []
    for side in case.sides:
        ids = side.read(f"layers.{layer}.mlp.expert_ids")
        values = side.read(f"layers.{layer}.mlp.expert_weights")
        if ids is None or values is None or ids.shape != values.shape:
            return None
        weights.append(by_expert(ids[rows], values[rows], case.model.config.experts))
    return shared_weights_differ(first, second, (weights[0], weights[1]))


def _order_differs(case: Case, layer: int, same: torch.Tensor) -> float | None:
    """Share of rows with equal sets (``same`` bool [row]) whose slots are in another order.

    None where an engine has no order: its numbers are derived from a map of experts.
    """
    name = f"layers.{layer}.mlp.expert_ids"
    if any(side.capture.points[name].how == "derived" for side in case.sides):
        return None
    first, second = (side.read(name) for side in case.sides)
    assert first is not None and second is not None
    if first.shape != second.shape or not bool(same.any()):
        return None
    rows = case.sides[0].fresh[same]
    return float((first[rows] != second[rows]).any(1).double().mean())


def _stream_differs(case: Case, layer: int, rows: torch.Tensor) -> float | None:
    """Median over rows (places, int64 [n]) of the relative difference of the layer's output."""
    name = boundary(layer + 1, case.layers)
    if not len(rows) or not all(side.has(name) for side in case.sides):
        return None
    at = rows.numpy()
    first, second = (side.values(name, side.index[at]) for side in case.sides)
    chains = case.joined.chains
    return point_difference(name, first, second, chains.position[at], chains.token[at]).median


def _gaps(sides: tuple[Side, Side], flipped: torch.Tensor) -> dict[Group, RouteGap]:
    """Mean log-prob differences by whether the row that predicts a token was re-routed."""
    chains = sides[0].chains
    gap = (sides[0].scores() - sides[1].scores()).abs()
    counted = torch.from_numpy(chains.scored) & gap.isfinite()
    so_far = rerouted_so_far(flipped, chains.lengths)

    def mean(rows: torch.Tensor) -> RouteGap:
        chosen = gap[counted & rows]
        return RouteGap(len(chosen), float(chosen.mean()) if len(chosen) else None)

    return {
        "same": mean(~so_far),
        "context": mean(so_far & ~flipped),
        "rerouted": mean(flipped),
    }
