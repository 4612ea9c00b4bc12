"""Measure one operator's output against the reference, and decide whether rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from layerbisect.bisect.residuals import (
    Fit,
    common_fits,
    fit,
    fit_each,
    rounding_noise,
    row_ratios,
)

each_channel = "each channel's gain"
"""Name of the direction that is fitted channel by channel."""

EXCESS_RATIO = 4.0
"""A row whose error is this many times the low-precision reference's is in excess."""
EXCESS_SHARE = 0.01
EXCESS_ROWS = 3
MEDIAN_RATIO = 2.0
SYSTEMATIC_Z = 8.0
SYSTEMATIC_SIZE = 1e-3
SYSTEMATIC_ROWS = 64
"""Fewer distinct rows than this cannot show a systematic error."""


@dataclass(frozen=True, slots=True)
class OwnError:
    """One operator's own error on one side.

    ``ratio`` is the 95th percentile over rows of the error in units of the low-precision
    reference's; ``floor`` is the same percentile of that reference itself; ``median`` and
    ``excess`` (share of rows beyond ``EXCESS_RATIO``) say how widespread it is. ``fits`` are the
    systematic parts beyond chance. ``covers`` has more than one operator where points between are
    not observable. ``set_aside`` counts rows whose route is too close to call. ``row_ratio`` [row]
    is each row's error and ``flat_rows`` [row] its place in the layout; ``error`` [row, channel] is
    kept for convicted operators only; ``parted`` says how q/k norm, rotation and projection were
    told apart.
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
    error: torch.Tensor | None = None
    parted: str = ""

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
    noise: torch.Tensor | None = None,
) -> OwnError:
    """Measure ``captured`` [row, ...] against the exact and the low-precision reference.

    ``directions`` maps a name to what the output would move by ([row, ...]) if an error of one unit
    in that direction were present; ``unit`` is the dtype's unit roundoff; ``noise`` [row, channel]
    is the standard deviation of rounding where the caller knows better than the estimate from the
    two references.
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
    scale = _noise(exact, low, unit, heads) if noise is None else noise[finite]
    error, error_low = (captured - exact).double() / scale, (captured - low).double() / scale
    ratio = _worst_head(error, heads)
    against_exact: dict[str, Fit] = {}
    against_low: dict[str, Fit] = {}
    for name, direction in directions.items():
        scaled = direction.flatten(1)[finite].double() / scale
        if name == each_channel:
            names = [f"channel {c} gain" for c in range(scaled.shape[1])]
            against_exact |= zip(names, fit_each(names, error, scaled), strict=True)
            against_low |= zip(names, fit_each(names, error_low, scaled), strict=True)
        else:
            against_exact[name] = fit(name, error, scaled)
            against_low[name] = fit(name, error_low, scaled)
    judged = OwnError(
        point=point,
        layer=layer,
        operator=operator,
        side=side,
        rows=len(captured),
        ratio=quantile(ratio, 0.95),
        floor=quantile(_worst_head((low - exact).double() / scale, heads), 0.95),
        median=quantile(ratio, 0.5),
        excess=float((ratio > EXCESS_RATIO).double().mean()),
        nonfinite=nonfinite,
        fits=_beyond_chance(common_fits(against_exact, against_low), len(captured)),
        covers=covers,
        set_aside=set_aside,
        row_ratio=ratio,
        flat_rows=flat_rows[finite],
    )
    return replace(judged, error=captured - exact) if judged.convicted else judged


def _noise(exact: torch.Tensor, low: torch.Tensor, unit: float, heads: int) -> torch.Tensor:
    """Rounding's standard deviation by element ([row, channel]), each head having its own scale."""
    parts = zip(exact.chunk(heads, 1), low.chunk(heads, 1), strict=True)
    return torch.cat([rounding_noise(a, b, unit) for a, b in parts], 1)


def _worst_head(error: torch.Tensor, heads: int) -> torch.Tensor:
    """Row ratio of the worst head: an error in one head of many is not averaged away."""
    return torch.stack([row_ratios(part) for part in error.chunk(heads, 1)]).amax(0)


def quantile(values: torch.Tensor, q: float) -> float:
    return float(values.double().quantile(q)) if len(values) else 0.0


def _beyond_chance(fits: Sequence[Fit], rows: int) -> tuple[Fit, ...]:
    if rows < SYSTEMATIC_ROWS:
        return ()
    beyond = [f for f in fits if abs(f.z) > SYSTEMATIC_Z and abs(f.coefficient) > SYSTEMATIC_SIZE]
    return tuple(sorted(beyond, key=lambda f: -abs(f.z))[:5])
