"""How far a SwiGLU gate may be from the exact one."""

from __future__ import annotations

import torch

from layerbisect.kernels.bounds.common import smallest_subnormal, unit_roundoff
from layerbisect.kernels.swiglu import swiglu

# z / (1 + exp(-z)) is 0 where exp(-z) overflows, from z = -88.7 on: 2.6e-37 too little
_OVERFLOWN = 2.0**-120


def swiglu_bound(gate: torch.Tensor, up: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Bound the error of silu(``gate``) * ``up``, both of one shape, in ``dtype``: the same shape.

    Float64. For silu in float32 from an exponential and a quotient that are off by two units in the
    last place, as GPUs compute them, the exponential as a power of two whose rounded exponent costs
    it a relative error of its size (Higham 2002, Accuracy and Stability of Numerical Algorithms,
    2.2 and 1.6 on conditioning); silu is then rounded to ``dtype`` or not, and the product is.
    """
    gate, up = gate.double(), up.double()
    u, stored = unit_roundoff(torch.float32), unit_roundoff(dtype)
    underflow = smallest_subnormal(dtype) / 2
    silu = torch.nn.functional.silu(gate).abs()
    # of a positive gate the exponent's error is damped; beyond -200 nothing is left to err
    steps = 16 + 2 * (-gate).clamp(0, 200)
    error = steps * u / (1 - steps * u) * silu + _OVERFLOWN
    error = error + stored * (silu + error) + underflow
    error = error * up.abs()
    rounding = (1 + u) * (1 + stored) - 1
    return error + rounding * (swiglu(gate, up).abs() + error) + underflow
