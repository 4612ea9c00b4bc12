"""FlashAttention 2, 3 and 4, each where it is installed.

Written against the signatures of flash-attn 2.8, of flash_attn_interface (version 3) and of
flash-attn-4 4.0; none of them was ever run by this project, since they need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from layerbisect.kernels.others.common import (
    Found,
    device_refuses,
    missing,
    refuse,
    refuse_tensor,
    starts,
    version,
)
from layerbisect.kernels.replay.implementation import Implementation, Unavailable


def implementations(operator: str, device: str) -> list[Found]:
    """Return one implementation of attention for each version; Unavailable ones say why."""
    if operator != "attention":
        return []
    known: tuple[tuple[str, str, str, tuple[str, ...], Callable[..., Any]], ...] = (
        ("flash-attn-2", "flash_attn", "flash-attn", ("cuda", "hip"), flash_2),
        ("flash-attn-3", "flash_attn_interface", "flash-attn-3", ("cuda",), flash_3),
        ("flash-attn-4", "flash_attn.cute", "flash-attn-4", ("cuda",), flash_4),
    )
    found: list[Found] = []
    for name, module, distribution, kinds, run in known:
        refusals = [device_refuses(device, kind) for kind in kinds]
        why = missing(module) or (None if None in refusals else refusals[0])
        if why:
            found.append(Unavailable(name, operator, why))
        else:
            found.append(Implementation(name, operator, version(distribution), run))
    return found


def flash_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    lengths: Sequence[int],
    scale: float,
    queries: Sequence[int] | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Run version 2's flash_attn_varlen_func."""
    from flash_attn import flash_attn_varlen_func

    refuse_tensor("flash-attn-2", "sinks", sinks)
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
    return _run("flash-attn-2", flash_attn_varlen_func, q, k, v, lengths, queries, scale, window)


def flash_3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    lengths: Sequence[int],
    scale: float,
    queries: Sequence[int] | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Run version 3's flash_attn_varlen_func, which by default does not split the keys."""
    from flash_attn_interface import flash_attn_varlen_func

    refuse_tensor("flash-attn-3", "sinks", sinks)
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
    return _run("flash-attn-3", flash_attn_varlen_func, q, k, v, lengths, queries, scale, window)


def flash_4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    lengths: Sequence[int],
    scale: float,
    queries: Sequence[int] | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Run version 4's flash_attn_varlen_func."""
    from flash_attn.cute import flash_attn_varlen_func

    window = (None, None) if sliding_window is None else (sliding_window - 1, 0)
    more = {} if sinks is None else {"learnable_sink": sinks.to(torch.bfloat16)}
    return _run(
        "flash-attn-4", flash_attn_varlen_func, q, k, v, lengths, queries, scale, window, **more
    )


def _run(
    name: str,
    function: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    queries: Sequence[int] | None,
    scale: float,
    window: tuple[int | None, int | None],
    **more: torch.Tensor,
) -> torch.Tensor:
    refuse(name, "dtype", q.dtype, torch.bfloat16, torch.float16)
    counts = queries or lengths
    made = function(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seqlens_q=starts(counts, q.device),
        cu_seqlens_k=starts(lengths, q.device),
        max_seqlen_q=max(counts, default=0),
        max_seqlen_k=max(lengths, default=0),
        softmax_scale=scale,
        # its last query sees all keys
        causal=True,
        window_size=window,
        **more,
    )
    context: torch.Tensor = made[0] if isinstance(made, tuple) else made
    return context
