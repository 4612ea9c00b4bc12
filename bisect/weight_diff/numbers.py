"""Two holders' values of one tensor: equal or not, how far apart, and simple ways to differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

EXPLAINED = 0.25
"""A fit explains a difference when it leaves at most this of its norm: 94 % of the square."""
_CHUNK = 1 << 20


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether all values are equal, NaN to NaN."""
    if first.shape != second.shape:
        return False
    if first.dtype != second.dtype:
        # torch promotes no float8
        wide = torch.float64 if 8 in (first.itemsize, second.itemsize) else torch.float32
        first, second = first.to(wide), second.to(wide)
    if torch.equal(first, second):
        return True
    # most differ somewhere, and hold no NaN
    nan = first != first
    return bool(nan.any()) and bool(((first == second) | (nan & (second != second))).all())


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


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over all values of two tensors, in float64."""

    count: int
    first: float
    second: float
    first_square: float
    second_square: float
    product: float
    difference_square: float


def moments(first: torch.Tensor, second: torch.Tensor) -> Moments:
    """Add up two tensors of one shape, a chunk at a time: float64 copies of all take too much."""
    sums = torch.zeros(6, dtype=torch.float64)
    a, b = first.reshape(-1), second.reshape(-1)
    for at in range(0, a.numel(), _CHUNK):
        x, y = (z[at : at + _CHUNK].double() for z in (a, b))
        apart = y - x
        sums += torch.stack([x.sum(), y.sum(), x @ x, y @ y, x @ y, apart @ apart])
    return Moments(a.numel(), *sums.tolist())


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Correlation of all values; 0 where one side is constant."""
    m = moments(first, second)
    spread = [
        square - total * total / m.count
        for square, total in ((m.first_square, m.first), (m.second_square, m.second))
    ]
    size = math.sqrt(max(spread[0], 0.0) * max(spread[1], 0.0))
    return (m.product - m.first * m.second / m.count) / size if size else 0.0


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
    m = moments(first, second)
    gain = m.product / max(m.first_square, 1e-300)
    offset = (m.second - m.first) / m.count
    gained = m.second_square - gain * m.product
    moved = m.difference_square - m.count * offset**2
    spread = m.second_square - m.second**2 / m.count
    return (
        Fit(gain, 0.0, _ratio(gained, min(m.difference_square, m.second_square))),
        Fit(1.0, offset, _ratio(moved, min(m.difference_square, spread))),
    )


def _ratio(left: float, whole: float) -> float:
    """Root of the ratio of two squared norms, of which rounding may have made one negative."""
    return math.sqrt(max(left, 0.0) / whole) if whole > 0 else math.inf


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
