"""Own error: what each operator of each side added, on the input that the engine itself captured.

It needs no other engine, so it says which side is wrong, and where two are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from layerbisect.bisect.directions import directions_of
from layerbisect.bisect.measure import EXCESS_RATIO, OwnError, measure, quantile
from layerbisect.bisect.operators import LayerPoints
from layerbisect.bisect.precision import Precision
from layerbisect.bisect.qkv import part
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.residuals import unique_rows, unit_roundoff
from layerbisect.bisect.side import Side

TIE_MARGIN = 8.0
"""A route whose margin is below this many deviations of the router's noise may flip."""


def own_errors(
    model: ReferenceModel,
    side: Side,
    layers: Iterable[int],
    progress: Callable[[], None] | None = None,
) -> list[OwnError]:
    """Judge every visible operator of ``layers`` on ``side``, in the order of computation."""
    found: list[OwnError] = []
    for layer in layers:
        points = LayerPoints(model, side, layer)
        for suffix in points.judged():
            if suffix == "mlp.expert_ids":
                error = _judge_selection(points)
            else:
                error = _judge(points, suffix)
                if suffix in ("attn.q", "attn.k") and error.beyond_rounding:
                    operator, why = part(points, suffix, error)
                    error = replace(error, operator=operator, parted=why)
            found.append(error)
        if progress is not None:
            progress()
    return found


def _judge(points: LayerPoints, suffix: str) -> OwnError:
    low = Precision.all_in(getattr(torch, points.side.dtype))
    captured = points.captured(suffix)
    assert captured is not None
    fresh = torch.from_numpy(points.side.chains.fresh)
    rows = torch.nonzero(fresh).squeeze(1)
    rows, set_aside = _distinct(points, suffix, rows, low)
    return measure(
        point=points.name(suffix),
        layer=points.layer,
        operator=points.operator(suffix),
        side=points.side.label,
        captured=captured[rows],
        exact=points.compute(suffix)[rows],
        low=points.compute(suffix, low)[rows],
        unit=unit_roundoff(points.side.dtype),
        directions={n: d[rows] for n, d in directions_of(points, suffix).items()},
        covers=points.covers(suffix),
        set_aside=set_aside,
        flat_rows=rows,
    )


def _distinct(
    points: LayerPoints, suffix: str, rows: torch.Tensor, low: Precision
) -> tuple[torch.Tensor, int]:
    """Keep one row of each set with equal input, and set aside routes that are too close."""
    covers = points.covers(suffix)
    if "attention" not in covers and "rope" not in covers:
        inputs = points.get("mid" if suffix.startswith(("mlp", "output")) else "input")
        rows = rows[unique_rows(inputs[rows])]
    if "router" in covers and "experts" in covers:
        sure = ~_may_flip(points, low)[rows]
        return rows[sure], int((~sure).sum())
    return rows, 0


def _may_flip(points: LayerPoints, low: Precision) -> torch.Tensor:
    exact = points.get("mlp.router_logits")
    noise = (points.get("mlp.router_logits", low) - exact).square().mean().sqrt()
    top = exact.topk(min(points.model.config.top_k + 1, exact.shape[1]), dim=-1).values
    return (top[:, -2] - top[:, -1]) < TIE_MARGIN * noise


def _judge_selection(points: LayerPoints) -> OwnError:
    """Check that the experts chosen are those with the largest router logits, up to near ties."""
    ids = points.captured("mlp.expert_ids")
    assert ids is not None
    low = Precision.all_in(getattr(torch, points.side.dtype))
    logits = points.get("mlp.router_logits")
    computed = points.compute("mlp.router_logits", low) - points.compute("mlp.router_logits")
    noise = float(computed.square().mean().sqrt())
    rows = torch.nonzero(torch.from_numpy(points.side.chains.fresh)).squeeze(1)
    logits, ids = logits[rows], ids[rows]
    valid = ((ids >= 0) & (ids < logits.shape[1])).all(1)
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    chosen.scatter_(1, ids.clamp(0, logits.shape[1] - 1), True)
    worst_in = logits.masked_fill(~chosen, torch.inf).amin(1)
    best_out = logits.masked_fill(chosen, -torch.inf).amax(1)
    whole = chosen.sum(1) == points.model.config.top_k
    ratio = ((best_out - worst_in) / max(noise, 1e-12)).clamp_min(0.0) / 2
    ratio = torch.where(valid & whole, ratio, torch.inf)
    return OwnError(
        point=points.name("mlp.expert_ids"),
        layer=points.layer,
        operator="router",
        side=points.side.label,
        rows=len(rows),
        ratio=quantile(ratio, 0.95),
        floor=0.0,
        median=quantile(ratio, 0.5),
        excess=float((ratio > EXCESS_RATIO).double().mean()),
        nonfinite=0,
        fits=(),
        covers=points.covers("mlp.expert_ids"),
        set_aside=0,
        row_ratio=ratio,
        flat_rows=rows,
    )
