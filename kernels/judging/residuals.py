"""Statistics of an operator's error on identical input: its noise, its size, its systematic part.

Rounding is random and a bug is systematic. So an error is measured twice: as a multiple, row by
row, of what the low-precision reference loses on the same input; and as the fit of directions that
a bug would move the output in (a gain, an offset by channel, a wrong scale), over rows, where
rounding averages away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

# prior weight, in channels, of the row's magnitude in the row's noise estimate
_PRIOR_CHANNELS = 8.0
_TINY = 1e-300
_LARGEST_T = 1e6
# deviations by which chance may be worse than it was
_SURE = 2.0
ONE_ROUNDING = 0.4
"""Root mean square error of one correct rounding, in unit roundoffs of the value."""
ORDER_FREEDOM = 4.0
"""How many times the error of one float32 computation may grow by summing in another order."""


def rounding_noise(exact: torch.Tensor, lows: Sequence[torch.Tensor], unit: float) -> torch.Tensor:
    """Estimate rounding's standard deviation by element, as a row factor times a channel factor.

    ``exact`` and each of ``lows`` are the exact and the low-precision reference's outputs, the
    latter under one draw of rounding or under several: [row, channel], or [row, head, channel]
    where each head has a scale of its own. ``unit`` is the dtype's unit roundoff: no channel is
    taken to be known much better than one rounding of its typical value leaves it. Factoring keeps
    one massive channel or one massive row from setting the scale of the rest. Returns float64 of
    the same shape.
    """
    error = torch.stack([(low - exact).double().square() for low in lows]).mean(0)
    size = exact.double().square()
    row_size = size.mean(-1, keepdim=True).clamp_min(_TINY)
    floor = (ONE_ROUNDING * unit) ** 2 * (size / row_size).mean(0)
    channel = ((error / row_size).mean(0) + 0.01 * floor).clamp_min(_TINY)
    row = (error / channel).mean(-1, keepdim=True)
    seen = exact.shape[-1] * len(lows)
    weight = seen / (seen + _PRIOR_CHANNELS)
    typical = (row / row_size).median(0, keepdim=True).values
    row = weight * row + (1 - weight) * typical * row_size
    return (row.clamp_min(_TINY) * channel).sqrt()


def typical_square(values: torch.Tensor) -> torch.Tensor:
    """Mean square by row times that by channel, the rows' sizes taken out: float64 [row, channel].

    The size of what a sum was made from, where terms that cancel may have left a small sum.
    """
    size = values.double().square()
    row_size = size.mean(-1, keepdim=True).clamp_min(_TINY)
    return row_size * (size / row_size).mean(0)


def order_freedom(dtype: str) -> float:
    """Widen noise where an engine sums in the dtype of its results.

    Sums are kept in float32, so their error is far below bfloat16's and float16's rounding; but a
    float32 result has the error of its sum, which grows with the number of terms that are added one
    by one and shrinks where partial sums are added instead. Engines choose that freely.
    """
    return ORDER_FREEDOM if dtype == "float32" else 1.0


def unit_roundoff(dtype: str) -> float:
    """Half the spacing of numbers around 1 in ``dtype`` (a torch dtype's name)."""
    kind: torch.dtype = getattr(torch, dtype)
    return float(torch.finfo(kind).eps) / 2


def row_ratios(scaled_error: torch.Tensor) -> torch.Tensor:
    """Root mean square over channels of an error in standard deviations: [row].

    Of an error [row, head, channel] the worst head counts, so that an error in one head of many is
    not averaged away.
    """
    by_group = scaled_error.square().mean(-1).sqrt()
    return by_group if by_group.ndim == 1 else by_group.amax(1)


@dataclass(frozen=True, slots=True)
class Fit:
    """How far a direction explains an error: its coefficient, and how sure it is not zero.

    ``z`` is the normal deviate that is as unlikely as the coefficient is by chance; ``explained``
    the share of the squared error that is gone with it. Of directions that look alike (a wrong
    softmax scale also changes the output's size) the one that explains most is the likely one.
    """

    name: str
    coefficient: float
    z: float
    explained: float


@dataclass(frozen=True, slots=True)
class Direction:
    """Fits of one direction, all at once: rows are the observations.

    ``moved`` [row, head, channel] is what the output moves by in units of its noise if an error of
    one unit in that direction is present; a coefficient below ``least`` does not count; ``reduce``
    sums [row, head, channel] to [row, fit]; ``name`` names a fit by its index.
    """

    moved: torch.Tensor
    least: float
    reduce: Callable[[torch.Tensor], torch.Tensor]
    name: Callable[[int], str]


def fits_beyond(
    direction: Direction,
    error: torch.Tensor,
    error_low: torch.Tensor,
    *,
    z: float,
) -> list[Fit]:
    """Fit an error against both references, and return what neither of them explains.

    ``error`` and ``error_low`` [row, head, channel] are the errors against the exact and the
    low-precision reference in units of noise. An engine may round as the low-precision reference
    does, or less: a table of cosines in bfloat16, say, is systematic against the exact operator and
    not against the low-precision one. So of each direction the weaker fit counts, and its deviate
    must be above ``z`` in absolute value.
    """
    weight = direction.reduce(direction.moved.square())
    found: list[Fit] = []
    exact = _fit(direction.reduce(error * direction.moved), weight)
    beyond = (exact[1].abs() > z) & (exact[0].abs() > direction.least)
    if not bool(beyond.any()):
        return found
    squares = float(error.square().sum())
    low = _fit(direction.reduce(error_low * direction.moved), weight)
    beyond &= (low[1].abs() > z) & (low[0].abs() > direction.least) & (low[0] * exact[0] > 0)
    for at in torch.nonzero(beyond).flatten().tolist():
        coefficient, deviate = min((exact, low), key=lambda pair: abs(float(pair[1][at])))
        size = float(coefficient[at])
        explained = size**2 * float(weight[:, at].sum()) / max(squares, _TINY)
        found.append(Fit(direction.name(at), size, float(deviate[at]), explained))
    return found


def smallest_beyond(
    direction: Direction,
    moved: torch.Tensor,
    error: torch.Tensor,
    error_low: torch.Tensor,
    *,
    z: float,
) -> float:
    """Return the smallest size of a bug that `fits_beyond` would have found, whatever its sign.

    ``direction`` has one fit, and ``moved`` [row, head, channel] is what the output moves by in
    units of its noise if a bug of size one is there: the direction's own, or one that it sees a
    share of. The bug adds to both fits' coefficients, on top of what chance makes of them, and to
    what spreads them where it is another direction's. With it the output is rounded anew, so both
    are taken as any draw of rounding may make them: an engine that agrees with the low-precision
    reference to the bit no longer does, and what chance makes may be `_SURE` deviations worse. A
    fit that is beyond chance already is no chance. Infinite where no size is found.
    """
    weight = direction.reduce(direction.moved.square())
    seen, unlike, freedom = _regress(direction.reduce(moved * direction.moved), weight)
    t = _student(z, freedom)
    own, apart, reference = (
        _wide_fit(direction.reduce(one * direction.moved), weight)
        for one in (error, error_low, error - error_low)
    )
    rounding = own[1].maximum(reference[1])
    spreads = rounding, apart[1].maximum(rounding.hypot(reference[1]))
    needed = torch.zeros(1, dtype=weight.dtype)
    for (coefficient, _), spread in zip((own, apart), spreads, strict=True):
        chance = torch.where(coefficient.abs() <= t * spread, coefficient.abs(), 0.0)
        chance = chance.maximum(_SURE * spread)
        # spreads add up to no more than their sum
        share = (seen.abs() - t * unlike.clamp_min(_TINY)).clamp_min(0.0)
        by_fit = (t * spread + chance) / share
        by_size = (direction.least + chance) / seen.abs()
        needed = needed.maximum(by_fit.maximum(by_size).nan_to_num(nan=torch.inf, posinf=torch.inf))
    return float(needed)


def _wide_fit(along: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients and the largest standard errors [fit] that these may be estimates of."""
    coefficient, spread, _ = _regress(along, weight)
    # a few rows may make most of it: the fourth powers say how well it is known
    fourth = (along - coefficient * weight).pow(4).sum(0).sqrt()
    wide = spread.square() + _SURE * fourth / weight.sum(0).clamp_min(_TINY).square()
    return coefficient, wide.sqrt().clamp_min(_TINY)


def _fit(along: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients and normal deviates [fit] of regressions through zero over rows.

    ``along`` and ``weight`` [row, fit] are the products of direction with error and with itself.
    The Student t of `_regress` is turned into a normal deviate (Wallace 1959).
    """
    coefficient, spread, freedom = _regress(along, weight)
    t = (coefficient / spread.clamp_min(_TINY)).clamp(-_LARGEST_T, _LARGEST_T)
    spare = freedom.clamp_min(1.0)
    deviate = _wallace(spare) * (spare * (t.square() / spare).log1p()).sqrt()
    return coefficient, torch.where(freedom >= 1, deviate * t.sign(), 0.0)


def _regress(
    along: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients, standard errors and degrees of freedom [fit].

    The standard error is the one that holds when errors within a row depend on one another
    (cluster-robust; Liang and Zeger 1986). A few heavy rows can be all that determines a fit, so
    its degrees of freedom are those of the effective number of rows (Kish 1965).
    """
    total = weight.sum(0).clamp_min(_TINY)
    coefficient = along.sum(0) / total
    spread = (along - coefficient * weight).square().sum(0).sqrt() / total
    return coefficient, spread, total.square() / weight.square().sum(0).clamp_min(_TINY) - 1


def _student(z: float, freedom: torch.Tensor) -> torch.Tensor:
    """Student t with the normal deviate ``z``: infinite where there is none below the largest."""
    spare = freedom.clamp_min(1.0)
    t = (spare * ((z / _wallace(spare)).square() / spare).expm1()).sqrt()
    return torch.where((freedom >= 1) & (t < _LARGEST_T), t, torch.inf)


def _wallace(freedom: torch.Tensor) -> torch.Tensor:
    return (8 * freedom + 1) / (8 * freedom + 3)


def unique_rows(values: torch.Tensor) -> torch.Tensor:
    """Index the first of each set of bitwise equal rows: equal input is one observation."""
    raw = np.ascontiguousarray(values.flatten(1).cpu().numpy())
    view = raw.view(np.dtype((np.void, raw.shape[1] * raw.itemsize))).ravel()
    _, first = np.unique(view, return_index=True)
    return torch.from_numpy(np.sort(first))
