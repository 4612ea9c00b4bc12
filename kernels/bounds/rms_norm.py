"""How far a root-mean-square normalisation may be from the exact one."""

from __future__ import annotations

import math

import torch

from layerbisect.kernels.bounds.common import gamma, smallest_subnormal, unit_roundoff
from layerbisect.kernels.rms_norm import rms_norm


def rms_norm_bound(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    rounds_before_weight: bool = True,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Bound the error of a norm in ``dtype`` of what ``rms_norm`` takes: the shape of ``x``.

    Float64. For squares that are summed in float32 in any order (Higham 2002, Accuracy and
    Stability of Numerical Algorithms, 3.1: all have one sign, so that the sum's relative error is
    gamma_n, of which the root leaves half); for a quotient and a root that are off by two units in
    the last place, as GPUs compute them; and for a result that is rounded once, or twice with
    ``rounds_before_weight``. A residual's sum may be rounded to ``dtype`` before it is squared,
    before it is scaled, before both, or never.
    """
    exact = rms_norm(
        x.double(),
        weight.double(),
        eps,
        residual=None if residual is None else residual.double(),
    )
    u, stored = unit_roundoff(torch.float32), unit_roundoff(dtype)
    added = 0.0 if residual is None else (1 + u) * (1 + stored) - 1
    # beside the squares and their sum: the mean, eps itself, and its addition
    summed = gamma(x.shape[-1] + 6, u)
    scale = 1 / ((1 - added) * math.sqrt(1 - summed))
    # the root, and the products with the scale and with the weight
    factor = (1 + added) * scale * (1 + gamma(10, u))
    factor *= (1 + stored) ** (2 if rounds_before_weight else 1)
    # numbers below the smallest normal one may be flushed to zero
    lost = smallest_subnormal(dtype) / 2 + torch.finfo(torch.float32).tiny
    return (factor - 1) * exact.abs() + lost * (1 + weight.double().abs())
