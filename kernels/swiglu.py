"""The gate of a feed-forward network: SwiGLU.

    y = silu(gate) * up,    silu(z) = z / (1 + exp(-z))

(Shazeer 2020, arXiv:2002.05202.) The low-precision form rounds silu and the product, as
transformers' and SGLang's PyTorch code does; fused kernels keep silu in float32 and round once.
"""

from __future__ import annotations

import torch

from layerbisect.kernels.rounding import require_compute_dtype, rounded


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, *, round_to: torch.dtype | None = None
) -> torch.Tensor:
    """Multiply ``up`` by silu of ``gate``, both of one shape, float32 or float64.

    Returns the shape and dtype of ``gate``. Raises TypeError for another dtype and ValueError when
    the shapes differ.
    """
    require_compute_dtype("gate", gate)
    if up.shape != gate.shape:
        raise ValueError(f"up must have shape {list(gate.shape)}, got {list(up.shape)}")
    return rounded(rounded(torch.nn.functional.silu(gate), round_to) * up, round_to)
