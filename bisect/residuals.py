"""Judge an operator's error on identical input: its size by row, and its systematic part.

Rounding is random and a bug is systematic. So the error is measured twice: as a multiple, row by
row, of what the low-precision reference loses on the same input; and as the fit of directions that
a bug would move the output in (a gain, an offset by channel, a wrong scale), over rows, where
rounding averages away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

# prior weight, in channels, of the row's magnitude in the row's noise estimate
_PRIOR_CHANNELS = 8.0
_TINY = 1e-300


def rounding_noise(exact: torch.Tensor, low: torch.Tensor, unit: float) -> torch.Tensor:
    """Estimate rounding's standard deviation by element, as a row factor times a channel factor.

    ``exact`` and ``low`` are the exact and the low-precision reference's outputs ([row, channel]);
    ``unit`` is the dtype's unit roundoff: no channel is taken to be known much better than one
    rounding of its typical value leaves it. Factoring keeps one massive channel or one massive row
    from setting the scale of the rest.
    """
    error = (low - exact).double().square()
    size = exact.double().square()
    row_size = size.mean(1, keepdim=True).clamp_min(_TINY)
    # one correct rounding leaves an rms error of about 0.4 unit roundoffs
    floor = (0.4 * unit) ** 2 * (size / row_size).mean(0)
    channel = ((error / row_size).mean(0) + 0.01 * floor).clamp_min(_TINY)
    row = (error / channel).mean(1, keepdim=True)
    weight = exact.shape[1] / (exact.shape[1] + _PRIOR_CHANNELS)
    row = weight * row + (1 - weight) * (row / row_size).median() * row_size
    return (row.clamp_min(_TINY) * channel).sqrt()


@dataclass(frozen=True, slots=True)
class Fit:
    """How far a direction explains an error: its coefficient, that over its standard error."""

    name: str
    coefficient: float
    z: float


def row_ratios(scaled_error: torch.Tensor) -> torch.Tensor:
    """Root mean square over channels of an error in standard deviations: [row]."""
    return scaled_error.square().mean(1).sqrt()


def fit(name: str, error: torch.Tensor, direction: torch.Tensor) -> Fit:
    """Fit ``error`` [row, channel] = coefficient * ``direction``, rows being the observations.

    The standard error is the one that holds when errors within a row depend on one another
    (cluster-robust; Liang and Zeger 1986).
    """
    along = (error * direction).sum(1)
    weight = direction.square().sum(1)
    return _fits([name], along[:, None], weight[:, None])[0]


def fit_each(names: Sequence[str], error: torch.Tensor, direction: torch.Tensor) -> tuple[Fit, ...]:
    """Fit each channel of ``error`` [row, channel] by the same channel of ``direction``."""
    return _fits(names, error * direction, direction.square())


def _fits(names: Sequence[str], along: torch.Tensor, weight: torch.Tensor) -> tuple[Fit, ...]:
    total = weight.sum(0)
    coefficient = along.sum(0) / total.clamp_min(_TINY)
    spread = (along - coefficient * weight).square().sum(0).sqrt() / total.clamp_min(_TINY)
    # a channel that one row alone determines is no observation of anything systematic
    lone = weight.amax(0) > 0.5 * total
    z = torch.where(lone | (total <= _TINY), 0.0, coefficient / spread.clamp_min(_TINY)).clamp(
        -1e6, 1e6
    )
    return tuple(
        Fit(name, float(c), float(t))
        for name, c, t in zip(names, coefficient.tolist(), z.tolist(), strict=True)
    )


def common_fits(
    against_exact: Mapping[str, Fit], against_low: Mapping[str, Fit]
) -> tuple[Fit, ...]:
    """Keep what neither precision explains: of each direction, the weaker of the two fits.

    An engine may round as the low-precision reference does, or less. A table of cosines in
    bfloat16, say, is systematic against the exact operator and not against the low-precision one.
    """
    kept = []
    for name, exact in against_exact.items():
        low = against_low[name]
        if exact.coefficient * low.coefficient > 0:
            kept.append(min(exact, low, key=lambda f: abs(f.z)))
    return tuple(kept)


def unit_roundoff(dtype: str) -> float:
    """Half the spacing of numbers around 1 in ``dtype`` (a torch dtype's name)."""
    kind: torch.dtype = getattr(torch, dtype)
    return float(torch.finfo(kind).eps) / 2


def unique_rows(values: torch.Tensor) -> torch.Tensor:
    """Index the first of each set of bitwise equal rows: equal input is one observation."""
    import numpy as np

    raw = np.ascontiguousarray(values.flatten(1).cpu().numpy())
    view = raw.view(np.dtype((np.void, raw.shape[1] * raw.itemsize))).ravel()
    _, first = np.unique(view, return_index=True)
    return torch.from_numpy(np.sort(first))
