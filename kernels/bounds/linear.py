"""How far a linear projection may be from the exact one."""

from __future__ import annotations

import torch

from layerbisect.kernels.bounds.common import gamma, smallest_subnormal, unit_roundoff


def linear_bound(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Bound the error of ``x`` [row, in] by ``weight`` [out, in] and ``bias`` [out]: [row, out].

    Float64. For any order of summation in float32, which may cut off instead of rounding, as tensor
    cores do (Fasi, Higham, Mikaitis and Pranesh 2021, Numerical Behavior of NVIDIA Tensor Cores),
    and a result in ``dtype``, rounded before the bias is added, or after that, or both (Higham
    2002, Accuracy and Stability of Numerical Algorithms, 3.5).
    """
    x, weight = x.double(), weight.double()
    terms = x.shape[-1]
    product = x @ weight.T
    magnitude = x.abs() @ weight.abs().T
    # what a product loses below the smallest normal number, which may be flushed to zero
    lost = terms * torch.finfo(torch.float32).tiny
    error = gamma(terms, 2 * unit_roundoff(torch.float32)) * magnitude + lost
    u, underflow = unit_roundoff(dtype), smallest_subnormal(dtype) / 2
    error = error + u * (product.abs() + error) + underflow
    if bias is None:
        return error
    total = (product + bias.double()).abs() + error
    error = error + unit_roundoff(torch.float32) * total
    return error + u * (total + error) + underflow
