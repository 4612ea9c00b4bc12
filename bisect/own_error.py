"""Own error: what each operator of each side added, on the input that the engine itself captured.

It needs no other engine, so it says which side is wrong, and where two are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from layerbisect.bisect.directions import directions_of, gains_of, units_of
from layerbisect.bisect.measure import EXCESS_RATIO, Output, OwnError, Sample, measure, quantile
from layerbisect.bisect.operators import LayerPoints
from layerbisect.bisect.qkv import acquit_shared_turn, part
from layerbisect.bisect.reduction import reduction_variance
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.residuals import ONE_ROUNDING, unit_roundoff
from layerbisect.bisect.side import Side

TIE_MARGIN = 8.0
"""A route whose margin is below this many deviations of the router's noise may flip."""

_INVALID = 1e6


def own_errors(model: ReferenceModel, side: Side, layers: Iterable[int]) -> list[OwnError]:
    """Judge every visible operator of ``layers`` on ``side``, in the order of computation."""
    found: list[OwnError] = []
    for layer in layers:
        points = LayerPoints(model, side, layer)
        inside: list[OwnError] = []
        for suffix in points.judged():
            if suffix == "mlp.expert_ids":
                error = _judge_selection(points)
            else:
                error = _judge(points, suffix)
                if suffix in ("attn.q", "attn.k") and error.convicted and error.rows:
                    error = part(points, suffix, error)
            inside.append(error)
        found += acquit_shared_turn(points, inside)
    return found


def _judge(points: LayerPoints, suffix: str) -> OwnError:
    captured = points.captured(suffix)
    assert captured is not None
    rows, set_aside = _observations(points, suffix)
    return measure(
        Output(
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
            gains=gains_of(points, suffix),
            directions={n: d[rows] for n, d in directions_of(points, suffix).items()},
            units=units_of(points, suffix),
            variance=reduction_variance(points, suffix, rows),
            set_aside=set_aside,
        )
    )


def _observations(points: LayerPoints, suffix: str) -> tuple[torch.Tensor, int]:
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
        sure = ~_may_flip(points)[rows]
        return rows[sure], int((~sure).sum())
    return rows, 0


def _may_flip(points: LayerPoints) -> torch.Tensor:
    """Say of each place (bool [flat]) whether rounding may choose another expert."""
    exact = points.get("mlp.router_logits")
    chosen = points.model.config.top_k
    if chosen == exact.shape[1]:
        return torch.zeros(len(exact), dtype=torch.bool)
    top = exact.topk(chosen + 1, dim=-1).values
    low = points.get("mlp.router_logits", points.side.low)
    return top[:, -2] - top[:, -1] <= TIE_MARGIN * _router_noise(points, exact, low)


def _router_noise(points: LayerPoints, exact: torch.Tensor, low: torch.Tensor) -> float:
    """Standard deviation of rounding in the router's logits: one rounding of them at least."""
    whole = (exact.isfinite() & low.isfinite()).all(1)
    least = ONE_ROUNDING * unit_roundoff(points.side.dtype) * exact[whole].square().mean().sqrt()
    return float(torch.maximum((low - exact)[whole].square().mean().sqrt(), least))


def _judge_selection(points: LayerPoints) -> OwnError:
    """Check that the experts chosen are those with the largest router logits, up to near ties."""
    captured = points.captured("mlp.expert_ids")
    assert captured is not None
    exact = points.compute("mlp.router_logits")
    noise = _router_noise(points, exact, points.compute("mlp.router_logits", points.side.low))
    logits = points.get("mlp.router_logits")
    rows = points.side.fresh
    rows = rows[logits[rows].isfinite().all(1)]
    logits, ids = logits[rows], captured[rows]
    slots = points.model.config.top_k
    chosen = _one_hot(ids.clamp(0, logits.shape[1] - 1), logits)
    valid = points.routed(ids) & (chosen.sum(1) == slots)
    worst_in = logits.masked_fill(~chosen, torch.inf).amin(1)
    best_out = logits.masked_fill(chosen, -torch.inf).amax(1)
    # in excess where a better expert was ahead by more than a near tie
    ratio = (best_out - worst_in).clamp_min(0.0) / noise * (EXCESS_RATIO / TIE_MARGIN)
    ratio = torch.where(valid, ratio, _INVALID)
    judged = OwnError(
        point=points.name("mlp.expert_ids"),
        layer=points.layer,
        operator="router",
        side=points.side.label,
        rows=len(rows),
        ratio=quantile(ratio, 0.95),
        floor=0.0,
        median=quantile(ratio, 0.5),
        excess=float((ratio > EXCESS_RATIO).double().mean()) if len(ratio) else 0.0,
        nonfinite=0,
        fits=(),
        covers=points.covers("mlp.expert_ids"),
        set_aside=0,
        row_ratio=ratio,
        flat_rows=rows,
    )
    if not judged.convicted:
        return judged
    best = _one_hot(logits.topk(slots, dim=1).indices, logits)
    wrong = (chosen.double() - best.double())[:, None]
    # each expert that is one too many or too few is far beyond rounding
    unit = torch.full_like(wrong, 1 / _INVALID)
    return replace(judged, sample=Sample.of(rows, wrong, unit, ratio))


def _one_hot(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
