"""Measure one operator's output against the reference, and decide whether rounding explains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from layerbisect.kernels.judging.own_error import EXCESS_RATIO, SYSTEMATIC_Z, OwnError, Sample
from layerbisect.kernels.judging.residuals import (
    Direction,
    Fit,
    fits_beyond,
    order_freedom,
    rounding_noise,
    row_ratios,
    unit_roundoff,
)
from layerbisect.kernels.judging.smallest import smallest_fault

SYSTEMATIC_SIZE = 1e-3
"""A smaller coefficient is no bug that anyone would see."""
SYSTEMATIC_ROWS = 64
"""Fewer distinct rows than this cannot show a systematic error."""

DRAWS = 16
"""Draws of rounding that a row's noise is estimated from before rows in excess alone convict."""

LOGIT_SCALE = "logit scale"
"""The direction of a log-prob, for which a factor on the output itself means nothing."""

_NAMED_FITS = 5

By = Literal["all", "head", "channel", "expert"]


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
    enough = len(captured) >= SYSTEMATIC_ROWS
    directions = _directions(output, exact, scale, finite) if enough else []
    fits: list[Fit] = []
    for direction in directions:
        fits += fits_beyond(direction, error, error_low, z=SYSTEMATIC_Z)
    fits = [replace(f, coefficient=f.coefficient * output.units.get(f.name, 1.0)) for f in fits]
    judged = replace(
        judged,
        ratio=quantile(ratio, 0.95),
        floor=quantile(row_ratios((low - exact).double() / scale), 0.95),
        median=quantile(ratio, 0.5),
        excess=float((ratio > EXCESS_RATIO).double().mean()),
        fits=tuple(sorted(fits, key=lambda f: -f.explained)[:_NAMED_FITS]),
        row_ratio=ratio,
        smallest_gain=smallest_fault(
            _scaled(output, exact, scale, finite),
            error,
            error_low,
            [one for one in directions if one.reduce is _over_all],
            least=_undone_by_rounding(exact, output.dtype),
        ),
    )
    if not judged.convicted:
        return judged
    return replace(judged, sample=Sample.of(judged.flat_rows, captured - exact, scale, ratio))


def measure_redrawn(output: Output, redraw: Callable[[int], Sequence[torch.Tensor]]) -> OwnError:
    """Measure, and once more with noise from many draws where rows in excess alone convict.

    ``redraw`` returns what ``output.low`` is under so many other draws of rounding.
    """
    error = measure(output)
    # float32 rounds nothing that could be drawn anew
    if output.dtype == "float32" or not error.rests_on_rows:
        return error
    # one draw of few independent errors is far too small an estimate in some rows, by chance
    return measure(replace(output, draws=redraw(DRAWS)))


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


def _scaled(
    output: Output, exact: torch.Tensor, scale: torch.Tensor, finite: torch.Tensor
) -> torch.Tensor:
    """What a factor moves, in units of noise: one on the output, of a log-prob on its logits."""
    moved = output.directions.get(LOGIT_SCALE)
    return (exact if moved is None else _by_head(moved[finite])).double() / scale


def _undone_by_rounding(exact: torch.Tensor, dtype: str) -> float:
    """Return the gain that rounding takes back where the exact values are numbers of the dtype."""
    kind: torch.dtype = getattr(torch, dtype)
    copies = torch.equal(exact.to(kind).to(exact.dtype), exact)
    return unit_roundoff(dtype) if copies else 0.0


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
