"""Rounding of intermediates through a narrower dtype.

The references compute in float32 or float64. With ``round_to`` they round what an ordinary
implementation in that dtype would write to memory, and nothing else: a sum inside a matrix product
stays in the compute dtype, as it does in every engine's accumulators. Inputs and weights are taken
as they are given; whoever calls decides how they were stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

COMPUTE_DTYPES = (torch.float32, torch.float64)

_scale: ContextVar[float] = ContextVar("scale", default=1.0)


@contextmanager
def shifted_grid(scale: float) -> Iterator[None]:
    """Let ``rounded`` round to the numbers of the narrower dtype divided by ``scale``.

    The numbers lie as densely, and others of them are near: on the same input every rounding error
    is as large as before (up to twice that among subnormal numbers) and is drawn anew. ``scale``
    must lie above 0.5 and not above 1, where nothing overflows that did not before.
    """
    before = _scale.set(scale)
    try:
        yield
    finally:
        _scale.reset(before)


def rounded(x: torch.Tensor, round_to: torch.dtype | None) -> torch.Tensor:
    """Round ``x`` through ``round_to`` and return it in its own dtype; None leaves it alone."""
    if round_to is None or round_to == x.dtype:
        return x
    scale = _scale.get()
    if scale == 1.0:
        return x.to(round_to).to(x.dtype)
    return (x * scale).to(round_to).to(x.dtype) / scale


def require_compute_dtype(name: str, x: torch.Tensor) -> None:
    """Raise TypeError unless ``x`` is float32 or float64."""
    if x.dtype not in COMPUTE_DTYPES:
        raise TypeError(f"{name} must be float32 or float64, got {x.dtype}")
