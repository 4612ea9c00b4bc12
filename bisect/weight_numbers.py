"""Two holders' values of one tensor: equal or not, how far apart, and simple ways to differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

EXPLAINED = 0.25
"""A fit explains a difference when it leaves at most this of its norm: 94 % of the square."""


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether all values are equal, NaN to NaN."""
    return first.shape == second.shape and bool(
        ((first == second) | ((first != first) & (second != second))).all()
    )


def equal_but_for_dtype(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether casting one to the other's dtype makes them equal: what an engine does on loading."""
    if first.dtype == second.dtype:
        return False
    casts = [(first.to(second.dtype), second), (first, second.to(first.dtype))]
    # the wider is cast to the narrower; of two 16-bit dtypes either may have been cast
    if first.itemsize != second.itemsize:
        casts = casts[:1] if first.itemsize > second.itemsize else casts[1:]
    return any(equal(a, b) for a, b in casts)


def unit(*tensors: torch.Tensor) -> float:
    """Half the spacing of the narrowest dtype at 1: the relative size of its rounding."""
    return max(torch.finfo(t.dtype).eps for t in tensors) / 2


def norm(values: torch.Tensor) -> float:
    """Euclidean norm, in float64."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Norm of the difference over the larger norm; 0 for two of zeros, NaN where values are."""
    larger = max(norm(first), norm(second))
    return norm(first - second) / larger if larger else 0.0


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Correlation of all values; 0 where one side is constant."""
    a, b = (x.reshape(-1) - x.mean() for x in (first, second))
    size = norm(a) * norm(b)
    return float((a.double() @ b.double()) / size) if size else 0.0


def garbage(values: torch.Tensor) -> str | None:
    """Say what no trained weight looks like: not finite, zeros or a constant; None otherwise."""
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        return "not finite" if bad == values.numel() else f"{bad} of {values.numel()} not finite"
    low, high = float(values.min()), float(values.max())
    if low != high or values.numel() == 1:
        return None
    return "zeros" if low == 0 else f"all {low:g}"


@dataclass(frozen=True, slots=True)
class Fit:
    """``second = gain * first + offset``, and what it leaves.

    ``left`` is the norm of what is left, over that of the difference or of ``second`` (about its
    mean, for an offset), whichever is smaller: a gain of nothing explains a difference, too.
    """

    gain: float
    offset: float
    left: float


def fits(first: torch.Tensor, second: torch.Tensor) -> tuple[Fit, Fit]:
    """Fit a gain alone and an offset alone, to two tensors that differ."""
    a, b = first.reshape(-1).double(), second.reshape(-1).double()
    apart = norm(b - a)
    gain = float(a @ b) / max(float(a @ a), 1e-300)
    offset = float((b - a).mean())
    return (
        Fit(gain, 0.0, _ratio(norm(b - gain * a), min(apart, norm(b)))),
        Fit(1.0, offset, _ratio(norm(b - a - offset), min(apart, norm(b - b.mean())))),
    )


def _ratio(left: float, whole: float) -> float:
    return left / whole if whole else math.inf


@dataclass(frozen=True, slots=True)
class LowRank:
    """The rank that explains a difference, and the share of its square, rounding taken off."""

    rank: int
    share: float


def low_rank(difference: torch.Tensor, rounding: float) -> LowRank | None:
    """Say whether few singular directions make a difference [out, in]; None where they do not.

    ``rounding`` is the norm of the rounding noise to be expected in it. The range is found by
    random projection (Halko, Martinsson and Tropp 2011), so that no full decomposition is needed.
    """
    if difference.ndim != 2 or min(difference.shape) < 16:
        return None
    most = max(1, min(64, min(difference.shape) // 8))
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(difference.shape[1], most + 8, generator=draw)
    basis = torch.linalg.qr(difference @ start)[0]
    # one power iteration: sharpens the range where singular values fall slowly
    basis = torch.linalg.qr(difference @ (difference.T @ basis))[0]
    squares = torch.linalg.svdvals(basis.T @ difference).double() ** 2
    whole = norm(difference) ** 2
    noise = min(rounding**2, whole)
    # each direction takes its part of the noise with it
    per_direction = noise / min(difference.shape)
    signal = max(whole - noise, 0.0)
    if signal < 0.2 * whole:
        return None
    taken = (squares - per_direction).clamp_min(0).cumsum(0)
    enough = (taken >= 0.95 * signal).nonzero()
    if not len(enough) or int(enough[0]) + 1 > most:
        return None
    rank = int(enough[0]) + 1
    return LowRank(rank, min(1.0, float(taken[rank - 1]) / signal))


def rounding_norm(values: torch.Tensor, eps: float) -> float:
    """Norm of the error of rounding ``values`` to a spacing of ``eps`` at 1, taken as uniform."""
    # on average over a binade the spacing is eps / sqrt(2) of the value or thereabouts
    return norm(values) * eps / math.sqrt(2 * 12)
