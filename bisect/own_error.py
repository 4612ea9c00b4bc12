"""Own error: what each operator of each side added, on the input that the engine itself captured.

It needs no other engine, so it says which side is wrong, and where two are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from layerbisect.bisect.directions import directions_of, each_channel
from layerbisect.bisect.operators import LayerPoints
from layerbisect.bisect.precision import Precision
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.residuals import (
    Fit,
    Noise,
    common_fits,
    fit,
    fit_each,
    row_ratios,
    unique_rows,
    unit_roundoff,
)
from layerbisect.bisect.side import Side

EXCESS_RATIO = 4.0
"""A row whose error is this many times the low-precision reference's is in excess."""
EXCESS_SHARE = 0.01
EXCESS_ROWS = 3
MEDIAN_RATIO = 2.0
SYSTEMATIC_Z = 8.0
SYSTEMATIC_SIZE = 1e-3
SYSTEMATIC_ROWS = 64
"""Fewer distinct rows than this cannot show a systematic error."""
TIE_MARGIN = 8.0
"""A route whose margin is below this many deviations of the router's noise may flip."""


@dataclass(frozen=True, slots=True)
class OwnError:
    """One operator's own error on one side.

    ``ratio`` is the 95th percentile over rows of the error in units of the low-precision
    reference's; ``floor`` is the same percentile of that reference itself; ``median`` and
    ``excess`` (share of rows beyond ``EXCESS_RATIO``) say how widespread it is. ``fits`` are the
    systematic parts beyond chance. ``covers`` has more than one operator where points between are
    not observable. ``set_aside`` counts rows whose route is too close to call.
    """

    point: str
    layer: int | None
    operator: str
    side: str
    rows: int
    ratio: float
    floor: float
    median: float
    excess: float
    nonfinite: int
    fits: tuple[Fit, ...]
    covers: tuple[str, ...]
    set_aside: int
    row_ratio: torch.Tensor
    flat_rows: torch.Tensor

    @property
    def convicted(self) -> bool:
        """Whether the error is beyond what rounding explains."""
        return bool(self.nonfinite or self.beyond_rounding or self.fits)

    @property
    def beyond_rounding(self) -> bool:
        """Whether its size alone convicts."""
        widespread = self.excess >= EXCESS_SHARE and self.excess * self.rows >= EXCESS_ROWS
        return self.rows > 0 and (self.median > MEDIAN_RATIO or widespread)

    @property
    def strength(self) -> float:
        """Order convictions: how many times beyond its threshold the error is."""
        by_size = max(self.median / MEDIAN_RATIO, self.ratio / EXCESS_RATIO)
        by_fit = max((abs(f.z) / SYSTEMATIC_Z for f in self.fits), default=0.0)
        return max(by_size, min(by_fit, 10.0), 1e3 if self.nonfinite else 0.0)


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
                found.append(_judge_selection(points))
            else:
                found.append(_judge(points, suffix))
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


def measure(
    *,
    point: str,
    layer: int | None,
    operator: str,
    side: str,
    captured: torch.Tensor,
    exact: torch.Tensor,
    low: torch.Tensor,
    unit: float,
    directions: dict[str, torch.Tensor],
    covers: tuple[str, ...],
    set_aside: int = 0,
    flat_rows: torch.Tensor,
) -> OwnError:
    """Measure ``captured`` [row, ...] against the exact and the low-precision reference.

    ``directions`` maps a name to what the output would move by ([row, ...]) if an error of one unit
    in that direction were present; ``unit`` is the dtype's unit roundoff.
    """
    heads = exact.shape[1] if exact.ndim == 3 else 1
    exact, low, captured = (t.flatten(1) for t in (exact, low, captured))
    finite = captured.isfinite().all(1)
    nonfinite = int((~finite).sum())
    exact, low, captured = exact[finite], low[finite], captured[finite]
    if not len(captured):
        return OwnError(
            point, layer, operator, side, 0, 0.0, 0.0, 0.0, 0.0, nonfinite, (), covers, set_aside,
            torch.zeros(0), flat_rows[finite],
        )  # fmt: skip
    noise = Noise.of(exact, low, unit)
    error = noise.scale(captured - exact)
    ratio = _by_head(error, heads)
    floor = _by_head(noise.scale(low - exact), heads)
    against_exact: dict[str, Fit] = {}
    against_low: dict[str, Fit] = {}
    error_low = noise.scale(captured - low)
    for name, direction in directions.items():
        scaled = noise.scale(direction.flatten(1)[finite])
        if name == each_channel:
            names = [f"channel {c} gain" for c in range(scaled.shape[1])]
            against_exact |= zip(names, fit_each(names, error, scaled), strict=True)
            against_low |= zip(names, fit_each(names, error_low, scaled), strict=True)
        else:
            against_exact[name] = fit(name, error, scaled)
            against_low[name] = fit(name, error_low, scaled)
    return OwnError(
        point=point,
        layer=layer,
        operator=operator,
        side=side,
        rows=len(captured),
        ratio=_quantile(ratio, 0.95),
        floor=_quantile(floor, 0.95),
        median=_quantile(ratio, 0.5),
        excess=float((ratio > EXCESS_RATIO).double().mean()),
        nonfinite=nonfinite,
        fits=_beyond_chance(common_fits(against_exact, against_low), len(captured)),
        covers=covers,
        set_aside=set_aside,
        row_ratio=ratio,
        flat_rows=flat_rows[finite],
    )


def _by_head(error: torch.Tensor, heads: int) -> torch.Tensor:
    """Row ratio of the worst head: an error in one head of many is not averaged away."""
    return torch.stack([row_ratios(part) for part in error.chunk(heads, 1)]).amax(0)


def _quantile(values: torch.Tensor, q: float) -> float:
    return float(values.double().quantile(q)) if len(values) else 0.0


def _beyond_chance(fits: Sequence[Fit], rows: int) -> tuple[Fit, ...]:
    if rows < SYSTEMATIC_ROWS:
        return ()
    beyond = [f for f in fits if abs(f.z) > SYSTEMATIC_Z and abs(f.coefficient) > SYSTEMATIC_SIZE]
    return tuple(sorted(beyond, key=lambda f: -abs(f.z))[:5])


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
        ratio=_quantile(ratio, 0.95),
        floor=0.0,
        median=_quantile(ratio, 0.5),
        excess=float((ratio > EXCESS_RATIO).double().mean()),
        nonfinite=0,
        fits=(),
        covers=points.covers("mlp.expert_ids"),
        set_aside=0,
        row_ratio=ratio,
        flat_rows=rows,
    )
