"""What the error bounds share: the unit roundoff, and what a sum of n terms may lose.

Higham 2002, Accuracy and Stability of Numerical Algorithms, 2nd edition, sections 2.2 and 3.1.
"""

from __future__ import annotations

import math

import torch


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to nearest: half the distance from 1 to the next.

    Numbers below the smallest normal one lose more: at most half of ``smallest_subnormal(dtype)``.
    """
    return torch.finfo(dtype).eps / 2


def smallest_subnormal(dtype: torch.dtype) -> float:
    """The spacing of the numbers nearest to zero; half of it is the error that underflow adds."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def gamma(n: int, u: float) -> float:
    """``n u / (1 - n u)``: the relative error that n roundings of unit roundoff u may add up to.

    A sum of n products, in any order, with or without fused multiply-add, is off by at most
    ``gamma(n, u)`` times the sum of the products' absolute values (Higham 2002, 3.5). Infinite
    where ``n u`` reaches 1: there nothing is promised.
    """
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    return n * u / (1 - n * u) if n * u < 1 else float("inf")


def probable_gamma(n: int, u: float) -> float:
    """What n roundings to nearest add up to but for a chance below ``2e-14 n``.

    They err to both sides, so that their errors add up like the root of n:
    ``exp(c sqrt(n) u + n u^2 / (1 - u)) - 1`` with c = 8 (Higham and Mary 2019, A New Approach to
    Probabilistic Rounding Error Analysis, theorem 2.4). Never above ``gamma``. Not for the sums
    inside tensor cores, which cut off.
    """
    return min(gamma(n, u), math.expm1(8 * math.sqrt(n) * u + n * u * u / (1 - u)))
