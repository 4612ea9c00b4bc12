"""Root-mean-square normalisation, of a residual stream or of each head's queries and keys.

    y = x / sqrt(mean(x^2) + eps) * weight

(Zhang and Sennrich 2019, arXiv:1910.07467.) With a residual, x + residual is normed.

Every engine reads x in its storage dtype and squares, averages, takes the root and scales in
float32. They differ in what is rounded before the end, as read in transformers 5.19, SGLang 0.5.23,
FlashInfer 0.7.2, torch 2.14 and megatron-core 0.16:

    the normalised value, before the weight multiplies it:
        transformers' Llama and Qwen3, SGLang with cast_x_before_out_mul
    nothing, the weight multiplies in float32:
        transformers' GPT-OSS, torch's F.rms_norm (megatron-core's local norm), FlashInfer
        (sgl_kernel), SGLang's forward_native and batch_invariant_ops

and with a residual:

    nothing, the float32 sum is normed:
        FlashInfer's FusedAddRMSNorm, SGLang's forward_native and its CUDA fused_add_rmsnorm with
        cast_x_before_out_mul
    the sum that is scaled, but not the one that is squared:
        SGLang's CUDA fused_add_rmsnorm otherwise
    the sum, as an operator of its own:
        transformers, megatron-core

The low-precision form here rounds the normalised value (``rounds_before_weight``) and the product,
or the product alone; a residual's sum stays in the compute dtype.
"""

from __future__ import annotations

import torch

from layerbisect.kernels.rounding import require_compute_dtype, rounded


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    rounds_before_weight: bool = True,
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Normalise ``x``, or ``x + residual``, over the last dimension.

    ``x`` [row, hidden] or [row, head, channel], float32 or float64; ``weight`` [hidden] or
    [channel]; ``residual`` of the shape of ``x``. Returns the shape and dtype of ``x``. Raises
    TypeError for another dtype and ValueError for shapes that don't fit.
    """
    require_compute_dtype("x", x)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must have shape {list(x.shape[-1:])}, got {list(weight.shape)}")
    if residual is not None:
        if residual.shape != x.shape:
            raise ValueError(
                f"residual must have shape {list(x.shape)}, got {list(residual.shape)}"
            )
        x = x + residual.to(x.dtype)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normalised = rounded(x * scale, round_to if rounds_before_weight else None)
    return rounded(normalised * weight.to(x.dtype), round_to)
