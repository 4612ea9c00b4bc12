"""How far the sum of the residual stream and a block's output may be from the exact one."""

from __future__ import annotations

import torch

from layerbisect.kernels.bounds.common import smallest_subnormal, unit_roundoff


def add_bound(stream: torch.Tensor, delta: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Bound the error of ``stream`` + ``delta``, both [row, hidden]: the same shape, float64.

    For a sum in float32 that is rounded to ``dtype`` (Higham 2002, Accuracy and Stability of
    Numerical Algorithms, 2.2).
    """
    total = (stream.double() + delta.double()).abs()
    # of two roundings, the second sees what the first has made
    twice = (1 + unit_roundoff(torch.float32)) * (1 + unit_roundoff(dtype)) - 1
    return twice * total + smallest_subnormal(dtype) / 2
