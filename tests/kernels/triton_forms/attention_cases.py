"""Queries, keys and values for the tests of both forms of attention."""

from __future__ import annotations

import torch

from layerbisect.kernels.attention import attention
from layerbisect.kernels.bounds.attention import attention_bound

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def made(
    rows: int, heads: int, kv_heads: int, channels: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [row, head, channel] and k, v [row, kv_head, channel]."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, count, channels, generator=generator).to(device, dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    return q, k, v


def made_sinks(heads: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a sink [head] that takes much, one that takes nothing, and some between."""
    return torch.linspace(-1, 3, heads).index_fill(0, torch.tensor(0), -torch.inf).to(device, dtype)


def of_bound(
    y: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    scale: float,
    window: int | None = None,
    queries: list[int] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the error of ``y`` as a multiple of what is allowed: [row, head, channel]."""
    exact = attention(
        q.double(),
        k.double(),
        v.double(),
        lengths,
        scale=scale,
        sliding_window=window,
        queries=queries,
        sinks=sinks,
    )
    bound = attention_bound(
        q,
        k,
        v,
        lengths,
        scale=scale,
        sliding_window=window,
        queries=queries,
        sinks=sinks,
        dtype=q.dtype,
    )
    return (y.double() - exact).abs() / bound
