"""How far a rotary position embedding may be from the exact one."""

from __future__ import annotations

import torch

from layerbisect.kernels.bounds.common import gamma, smallest_subnormal, unit_roundoff
from layerbisect.kernels.rope import pairs


def rope_bound(
    x: torch.Tensor,
    position: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Bound the error of turning ``x`` [row, head, channel] in ``dtype``: the same shape, float64.

    For an angle that is a float32 product, which errs in proportion to the position: 0.06 radians
    of a million, so that far out the bound is wide; for cosine and sine that are off by two units
    in the last place of 1; and for roundings of both of them, of both products and of their sum to
    ``dtype``, or of the sum alone (Higham 2002, Accuracy and Stability of Numerical Algorithms,
    2.2 and 3.1).
    """
    u, stored = unit_roundoff(torch.float32), unit_roundoff(dtype)
    underflow = smallest_subnormal(dtype) / 2
    angle = position.double()[:, None, None] * inv_freq.double()
    scaling = abs(attention_scaling)
    # no two values of a cosine are further apart than 2
    off = scaling * ((gamma(2, u) * angle.abs()).clamp(max=2.0) + 4 * u)

    def coefficient(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = scaling * exact.abs()
        rounding = (1 + u) * (1 + stored) - 1
        return size, off + rounding * (size + off) + underflow

    cos, cos_error = coefficient(angle.cos())
    sin, sin_error = coefficient(angle.sin())
    bound = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    first, second = pairs(x.double().abs(), interleaved)
    # a product's rounding and the sum's, each in float32 and then to the storage dtype
    rounding = ((1 + u) * (1 + stored)) ** 2 - 1
    for out, with_cos, with_sin in zip(
        pairs(bound, interleaved), (first, second), (second, first), strict=True
    ):
        error = with_cos * cos_error + with_sin * sin_error
        size = with_cos * cos + with_sin * sin
        out[:] = error + rounding * (size + error) + 3 * underflow
    return bound
