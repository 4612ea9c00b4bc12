"""Linear projection: ``y = x @ weight.T + bias``.

The low-precision form accumulates in the compute dtype, adds the bias to the accumulator, and
rounds once.
"""

from __future__ import annotations

import torch

from layerbisect.kernels.rounding import require_compute_dtype, rounded


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Project ``x`` [row, in] by ``weight`` [out, in] and ``bias`` [out] to [row, out].

    ``x`` is float32 or float64, and so is the result; weight and bias may be of any float dtype.
    Raises TypeError for another dtype of ``x`` and ValueError when the sizes don't fit.
    """
    require_compute_dtype("x", x)
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight must have shape [out, {x.shape[-1]}], got {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {list(weight.shape[:1])}, got {list(bias.shape)}")
    result = torch.nn.functional.linear(
        x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    )
    return rounded(result, round_to)
