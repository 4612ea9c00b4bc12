"""Rounding of intermediates through a narrower dtype.

The references compute in float32 or float64. With ``round_to`` they round what an ordinary
implementation in that dtype would write to memory, and nothing else: a sum inside a matrix product
stays in the compute dtype, as it does in every engine's accumulators. Inputs and weights are taken
as they are given; whoever calls decides how they were stored.
"""

from __future__ import annotations

import torch

COMPUTE_DTYPES = (torch.float32, torch.float64)


def rounded(x: torch.Tensor, round_to: torch.dtype | None) -> torch.Tensor:
    """Round ``x`` through ``round_to`` and return it in its own dtype; None leaves it alone."""
    if round_to is None or round_to == x.dtype:
        return x
    return x.to(round_to).to(x.dtype)


def require_compute_dtype(name: str, x: torch.Tensor) -> None:
    """Raise TypeError unless ``x`` is float32 or float64."""
    if x.dtype not in COMPUTE_DTYPES:
        raise TypeError(f"{name} must be float32 or float64, got {x.dtype}")
