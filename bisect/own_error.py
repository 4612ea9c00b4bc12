"""Own error: what each operator of each side added, on the input that the engine itself captured.

It needs no other engine, so it says which side is wrong, and where two are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from layerbisect.bisect.directions import directions_of, units_of
from layerbisect.bisect.dispatch import judge_dispatch
from layerbisect.bisect.operators import LayerPoints
from layerbisect.bisect.qkv import acquit_shared_turn, part
from layerbisect.bisect.reduction import reduction_variance
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.selection import acquit_weights, judge_selection, may_flip
from layerbisect.bisect.side import Side
from layerbisect.kernels.judging.directions import gains_of
from layerbisect.kernels.judging.measure import Output, measure_redrawn
from layerbisect.kernels.judging.own_error import OwnError


def own_errors(model: ReferenceModel, side: Side, layers: Iterable[int]) -> list[OwnError]:
    """Judge every visible operator of ``layers`` on ``side``, in the order of computation."""
    found: list[OwnError] = []
    for layer in layers:
        points = LayerPoints(model, side, layer)
        inside: list[OwnError] = []
        for suffix in points.judged():
            if suffix == "mlp.expert_ids":
                error = judge_selection(points)
            elif suffix == "mlp.expert_in" and not points.hidden(suffix):
                error = judge_dispatch(points)
            else:
                error = _judge(points, suffix)
            inside.append(error)
        found += acquit_weights(points, acquit_shared_turn(points, part(points, inside)))
    return found


def _judge(points: LayerPoints, suffix: str) -> OwnError:
    captured = points.captured(suffix)
    assert captured is not None
    rows, set_aside = observations(points, suffix)
    output = Output(
        point=points.name(suffix),
        layer=points.layer,
        operator=points.operator(suffix),
        side=points.side.label,
        dtype=points.side.dtype,
        captured=captured[rows],
        exact=points.compute(suffix)[rows],
        low=points.compute(suffix, points.side.low)[rows],
        flat_rows=rows,
        covers=points.covers(suffix),
        gains=gains_of(suffix, points.covers(suffix)),
        experts=points.get("mlp.expert_ids")[rows] if suffix == "mlp.expert_out" else None,
        directions={n: d[rows] for n, d in directions_of(points, suffix).items()},
        units=units_of(points, suffix),
        variance=reduction_variance(points, suffix, rows),
        set_aside=set_aside,
    )
    return measure_redrawn(output, lambda draws: [d[rows] for d in points.redrawn(suffix, draws)])


def observations(points: LayerPoints, suffix: str) -> tuple[torch.Tensor, int]:
    """Keep one row of each set with equal input, and set aside routes that are too close."""
    covers = points.covers(suffix)
    if "attention" in covers or "rope" in covers:
        rows = points.side.fresh
    else:
        rows = points.distinct("mid" if suffix.startswith(("mlp", "output")) else "input")
    ids = points.captured("mlp.expert_ids") if suffix.startswith("mlp") and points.sparse else None
    if ids is not None:
        rows = rows[points.routed(ids[rows])]
    if "router" in covers and "experts" in covers:
        sure = ~may_flip(points)[rows]
        return rows[sure], int((~sure).sum())
    return rows, 0
