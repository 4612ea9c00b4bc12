"""Measure one operator's output against the reference, and decide whether rounding explains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from layerbisect.kernels.judging.residuals import (
    Direction,
    Fit,
    fits_beyond,
    order_freedom,
    rounding_noise,
    row_ratios,
    unit_roundoff,
)

EXCESS_RATIO = 4.0
"""A row whose error is this many times the low-precision reference's is in excess."""
EXCESS_SHARE = 0.01
EXCESS_ROWS = 3
EXTREME_RATIO = 32.0
"""No rounding makes a row's error this many times the reference's: one such row is enough."""
MEDIAN_RATIO = 2.0
SYSTEMATIC_Z = 8.0
SYSTEMATIC_SIZE = 1e-3
"""A smaller coefficient is no bug that anyone would see."""
SYSTEMATIC_ROWS = 64
"""Fewer distinct rows than this cannot show a systematic error."""

SAMPLED_ROWS = 24

_NAMED_FITS = 5

By = Literal["all", "head", "channel", "expert"]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The errors of some rows, the worst ones among them.

    ``error`` and ``noise`` are [row, head, channel], ``flat_rows`` [row] their places in the
    layout. A few rows, for a side that runs other weights is convicted of hundreds of operators.
    """

    flat_rows: torch.Tensor
    error: torch.Tensor
    noise: torch.Tensor

    @classmethod
    def of(
        cls,
        flat_rows: torch.Tensor,
        error: torch.Tensor,
        noise: torch.Tensor,
        ratio: torch.Tensor,
    ) -> Sample:
        """Keep the rows with the largest ``ratio`` [row], and as many evenly spread ones."""
        count = min(SAMPLED_ROWS, len(ratio))
        spread = torch.linspace(0, len(ratio) - 1, count).long()
        rows = torch.cat([ratio.topk(count).indices, spread]).unique()
        return cls(flat_rows[rows], error[rows].float(), noise[rows].float())


@dataclass(frozen=True, slots=True, eq=False)
class OwnError:
    """One operator's own error on one side.

    ``ratio`` is the 95th percentile over rows of the error in units of the low-precision
    reference's; ``floor`` is the same percentile of that reference itself; ``median`` and
    ``excess`` (share of rows beyond ``EXCESS_RATIO``) say how widespread it is. ``fits`` are the
    systematic parts beyond chance. ``covers`` has more than one operator where points between are
    not observable. ``set_aside`` counts rows whose route is too close to call. ``row_ratio`` [row]
    is each row's error and ``flat_rows`` [row] its place in the layout; ``sample`` is kept for
    convicted operators only; ``parted`` says how q/k norm, rotation and projection were told apart;
    ``acquitted`` why an error beyond rounding changes nothing.
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
    sample: Sample | None = None
    parted: str = ""
    acquitted: str = ""

    @property
    def convicted(self) -> bool:
        """Whether the error is beyond what rounding explains."""
        return not self.acquitted and bool(self.nonfinite or self.far_off or self.fits)

    @property
    def far_off(self) -> bool:
        """Whether its size convicts, in many rows or in one."""
        return self.beyond_rounding or self.extreme > 0

    @property
    def extreme(self) -> int:
        """Count rows that are so far off that each of them convicts."""
        # how near a tie in routing is too near is itself an estimate
        if "router" in self.covers and "experts" in self.covers:
            return 0
        return int((self.row_ratio > EXTREME_RATIO).sum())

    @property
    def beyond_rounding(self) -> bool:
        """Whether its size in many rows convicts."""
        widespread = self.excess >= EXCESS_SHARE and self.excess * self.rows >= EXCESS_ROWS
        return self.rows > 0 and (self.median > MEDIAN_RATIO or widespread)

    @property
    def strength(self) -> float:
        """Order convictions: how many times beyond its threshold the error is."""
        if self.acquitted:
            return 0.0
        by_size = max(self.median / MEDIAN_RATIO, self.ratio / EXCESS_RATIO)
        by_fit = max((abs(f.z) / SYSTEMATIC_Z for f in self.fits), default=0.0)
        by_row = float(self.row_ratio.max()) / EXTREME_RATIO if self.extreme else 0.0
        return max(by_size, min(by_row, 10.0), min(by_fit, 10.0), 1e3 if self.nonfinite else 0.0)


@dataclass(frozen=True, slots=True)
class Output:
    """What an operator put out on one side, and what the references make of the same input.

    ``captured``, ``exact`` and ``low`` are [row, ...]; ``flat_rows`` [row] are their places in the
    layout. ``gains`` says at which grain a factor on the output is fitted (``channel`` also fits an
    offset), ``experts`` [row, slot] which expert made each slot, and ``directions`` maps further
    names to what the output would move by ([row, ...]) if an error of one unit in that direction
    were present, ``units`` how large that unit is where it is not one. ``draws`` are what ``low``
    is under other draws of rounding, from which noise is estimated where there are any. ``noise``
    [row, channel] is the standard deviation of rounding where more is known of it than the
    references show, and ``variance`` [row, channel] what rounds besides.
    """

    point: str
    layer: int | None
    operator: str
    side: str
    dtype: str
    captured: torch.Tensor
    exact: torch.Tensor
    low: torch.Tensor
    flat_rows: torch.Tensor
    covers: tuple[str, ...]
    gains: tuple[By, ...] = ()
    experts: torch.Tensor | None = None
    directions: Mapping[str, torch.Tensor] = field(default_factory=dict)
    units: Mapping[str, float] = field(default_factory=dict)
    noise: torch.Tensor | None = None
    variance: torch.Tensor | None = None
    draws: Sequence[torch.Tensor] = ()
    set_aside: int = 0


def measure(output: Output) -> OwnError:
    """Measure an output against the exact and the low-precision reference.

    Rows in which a reference is not finite, as its input was not, are set aside.
    """
    known = _finite(output.exact) & _finite(output.low)
    finite = _finite(output.captured) & known
    exact, low, captured = (
        _by_head(t[finite]) for t in (output.exact, output.low, output.captured)
    )
    judged = OwnError(
        point=output.point,
        layer=output.layer,
        operator=output.operator,
        side=output.side,
        rows=len(captured),
        ratio=0.0,
        floor=0.0,
        median=0.0,
        excess=0.0,
        nonfinite=int((known & ~finite).sum()),
        fits=(),
        covers=output.covers,
        set_aside=output.set_aside + int((~known).sum()),
        row_ratio=torch.zeros(len(captured)),
        flat_rows=output.flat_rows[finite],
    )
    if not len(captured):
        return judged
    scale = _noise(output, exact, low, finite)
    error, error_low = (captured - exact).double() / scale, (captured - low).double() / scale
    ratio = row_ratios(error)
    fits: list[Fit] = []
    if len(captured) >= SYSTEMATIC_ROWS:
        for direction in _directions(output, exact, scale, finite):
            fits += fits_beyond(direction, error, error_low, z=SYSTEMATIC_Z)
    fits = [replace(f, coefficient=f.coefficient * output.units.get(f.name, 1.0)) for f in fits]
    judged = replace(
        judged,
        ratio=quantile(ratio, 0.95),
        floor=quantile(row_ratios((low - exact).double() / scale), 0.95),
        median=quantile(ratio, 0.5),
        excess=float((ratio > EXCESS_RATIO).double().mean()),
        fits=tuple(sorted(fits, key=lambda f: -abs(f.z))[:_NAMED_FITS]),
        row_ratio=ratio,
    )
    if not judged.convicted:
        return judged
    return replace(judged, sample=Sample.of(judged.flat_rows, captured - exact, scale, ratio))


def quantile(values: torch.Tensor, q: float) -> float:
    """Quantile of [n] values, 0 where there are none."""
    return float(values.double().quantile(q)) if len(values) else 0.0


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).isfinite().all(1)


def _noise(
    output: Output, exact: torch.Tensor, low: torch.Tensor, finite: torch.Tensor
) -> torch.Tensor:
    """Standard deviation of rounding by element, float64 [row, head, channel]."""
    if output.noise is not None:
        return _by_head(output.noise[finite]).double()
    lows = [_by_head(draw[finite]) for draw in output.draws] or [low]
    noise = rounding_noise(exact, lows, unit_roundoff(output.dtype)) * order_freedom(output.dtype)
    if output.variance is None:
        return noise
    return (noise.square() + _by_head(output.variance[finite])).sqrt()


def _by_head(values: torch.Tensor) -> torch.Tensor:
    """View [row, channel] as [row, 1, channel]."""
    return values if values.ndim == 3 else values[:, None]


def _directions(
    output: Output, exact: torch.Tensor, scale: torch.Tensor, finite: torch.Tensor
) -> list[Direction]:
    found = []
    gain = exact.double() / scale
    # rounding the products with one weight is biased by up to half a unit roundoff
    least = max(SYSTEMATIC_SIZE, unit_roundoff(output.dtype))
    for by in output.gains:
        if by == "all":
            found.append(Direction(gain, SYSTEMATIC_SIZE, _over_all, lambda at: "gain"))
        elif by == "head" and exact.shape[1] > 1:
            found.append(
                Direction(gain, SYSTEMATIC_SIZE, _over_channels, lambda at: f"head {at} gain")
            )
        elif by == "expert" and output.experts is not None:
            over = _over_experts(output.experts[finite])
            found.append(Direction(gain, least, over, lambda at: f"expert {at} gain"))
        elif by == "channel":
            found.append(Direction(gain, least, _over_nothing, lambda at: f"channel {at} gain"))
            typical = exact.double().square().mean(0, keepdim=True).sqrt() / scale
            found.append(
                Direction(typical, least, _over_nothing, lambda at: f"channel {at} offset")
            )
    for name, moved in output.directions.items():
        scaled = _by_head(moved[finite]).double() / scale
        found.append(Direction(scaled, SYSTEMATIC_SIZE, _over_all, _constant(name)))
    return found


def _constant(name: str) -> Callable[[int], str]:
    return lambda at: name


def _over_all(values: torch.Tensor) -> torch.Tensor:
    return values.sum((1, 2))[:, None]


def _over_channels(values: torch.Tensor) -> torch.Tensor:
    return values.sum(2)


def _over_experts(ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def over(values: torch.Tensor) -> torch.Tensor:
        sums = values.new_zeros(len(ids), int(ids.max()) + 1)
        return sums.scatter_add_(1, ids, values.sum(2))

    return over


def _over_nothing(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1)
