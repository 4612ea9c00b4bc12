"""Root-mean-square normalisation, of a residual stream or of each head's queries and keys.

    y = x / sqrt(mean(x^2) + eps) * weight

(Zhang and Sennrich 2019, arXiv:1910.07467.) The low-precision form normalises in the compute dtype,
rounds, multiplies by the weight, and rounds again, as transformers' Llama and Qwen3 modules do;
fused kernels round once.
"""

from __future__ import annotations

import torch

from layerbisect.kernels.rounding import require_compute_dtype, rounded


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Normalise over the last dimension.

    ``x`` [row, hidden] or [row, head, channel], float32 or float64; ``weight`` [hidden] or
    [channel]. Returns the shape and dtype of ``x``. Raises TypeError for another dtype and
    ValueError when the weight's length isn't that of the last dimension.
    """
    require_compute_dtype("x", x)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must have shape {list(x.shape[-1:])}, got {list(weight.shape)}")
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normalised = rounded(x * scale, round_to)
    return rounded(normalised * weight.to(x.dtype), round_to)
