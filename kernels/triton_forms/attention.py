"""Triton forms of attention over whole sequences and chunks of them.

A program holds a tile of one head's queries and goes over the keys tile by tile.

The fast form picks its tiles by the shapes of the batch, so that a row's bits depend on what runs
beside it. The deterministic form has tiles of one size, which begin at multiples of it from a
sequence's first key on: wherever a chunk begins, a row takes the same keys together in the same
order. A decode step does the same with a tile of which one query's heads fill a part, so that the
products run through the same instructions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from layerbisect.kernels.attention_rows import checked_queries
from layerbisect.kernels.triton_forms.attention_tiles import (
    attended,
    check_supported,
    divided,
    tiles,
    warps,
    width,
)
from layerbisect.kernels.triton_forms.common import Build, aligned, dot, interpreting, narrowed


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    sliding_window: int | None = None,
    queries: Sequence[int] | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool,
) -> torch.Tensor:
    """Attend within each sequence, as `layerbisect.kernels.attention` says.

    ``q``, ``k`` and ``v`` in bfloat16, float16 or float32, and so the context. Raises Unsupported
    for other dtypes and more than 256 channels, ValueError for shapes that don't fit.
    """
    counts = checked_queries(q, k, v, lengths, queries, sinks)
    check_supported(q, k, v)
    q, k, v = aligned(q), aligned(k), aligned(v)
    context = torch.empty_like(q)
    if not len(q):
        return context
    rows, keys = tiles(q, max(counts), deterministic)
    _prefill[(triton.cdiv(max(counts), rows), q.shape[1], len(lengths))](
        q,
        k,
        v,
        None if sinks is None else aligned(sinks),
        context,
        _starts(counts, q.device),
        _starts(lengths, q.device),
        scale * math.log2(math.e),
        HEADS=q.shape[1],
        KV_HEADS=k.shape[1],
        CHANNELS=q.shape[2],
        WINDOW=sliding_window,
        ROWS=rows,
        KEYS=keys,
        WIDTH=width(q.shape[2]),
        INTERPRETED=interpreting(),
        num_warps=warps(rows),
        num_stages=2,
        enable_fp_fusion=False,
    )
    return context


def _starts(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where each sequence's rows begin, and the end of the last one."""
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0).to(device)


def builds() -> list[Build]:
    """Return what to compile without a GPU: a model with grouped heads, and one with sinks."""
    made = []
    for name, channels, window in (("", 128, None), (" window and sinks", 64, 128)):
        q = torch.empty(0, 64, channels, dtype=torch.bfloat16)
        for form, queries, deterministic in (
            ("deterministic", 4096, True),
            ("fast", 4096, False),
            ("fast, few queries", 16, False),
        ):
            rows, keys = tiles(q, queries, deterministic)
            tensors = dict.fromkeys(("q", "k", "v", "context"), "*bf16")
            sinks = {"sinks": "*bf16"} if window else {}
            starts = dict.fromkeys(("query_starts", "key_starts"), "*i64")
            made.append(
                Build(
                    f"attention {form}{name}",
                    _prefill,
                    tensors | sinks | starts | {"scale": "fp32"},
                    {
                        **({} if window else {"sinks": None}),
                        "HEADS": 64,
                        "KV_HEADS": 8,
                        "CHANNELS": channels,
                        "WINDOW": window,
                        "ROWS": rows,
                        "KEYS": keys,
                        "WIDTH": width(channels),
                        "INTERPRETED": False,
                    },
                    warps(rows),
                )
            )
    return made


@triton.jit  # type: ignore[untyped-decorator]
def _prefill(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    sinks: tl.tensor,
    context: tl.tensor,
    query_starts: tl.tensor,
    key_starts: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_query = tl.load(query_starts + sequence)
    count = (tl.load(query_starts + sequence + 1) - first_query).to(tl.int32)
    first_key = tl.load(key_starts + sequence)
    length = (tl.load(key_starts + sequence + 1) - first_key).to(tl.int32)
    begin = tl.program_id(0) * ROWS
    if begin >= count:
        return

    row = begin + tl.arange(0, ROWS)
    position = length - count + row
    channel = tl.arange(0, WIDTH)
    at = ((first_query + row) * HEADS + head)[:, None] * CHANNELS + channel[None, :]
    real = (row < count)[:, None] & (channel < CHANNELS)[None, :]
    queries = tl.load(q + at, mask=real, other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    made = tl.zeros([ROWS, WIDTH], tl.float32)
    # tiles before left are at the window's edge, and from right on some row doesn't see all
    first_position = length - count + begin
    first, left = 0, 0
    if WINDOW is not None:
        first = tl.maximum(first_position + 1 - WINDOW, 0) // KEYS * KEYS
        left = tl.cdiv(tl.maximum(first_position + ROWS - WINDOW, 0), KEYS) * KEYS
    right = tl.maximum((first_position + 1) // KEYS * KEYS, left)
    last = tl.minimum(first_position + ROWS, length)
    for part in tl.static_range(3):
        start = first if part == 0 else left if part == 1 else right
        end = tl.minimum(left, last) if part == 0 else right if part == 1 else last
        for at_key in range(start, end, KEYS):
            key = at_key + tl.arange(0, KEYS)
            of_key = ((first_key + key) * KV_HEADS + head // (HEADS // KV_HEADS)) * CHANNELS
            stored = (key < length) | (part == 1)
            keys = tl.load(
                k + of_key[None, :] + channel[:, None],
                mask=stored[None, :] & (channel < CHANNELS)[:, None],
                other=0.0,
            )
            values = tl.load(
                v + of_key[:, None] + channel[None, :],
                mask=stored[:, None] & (channel < CHANNELS)[None, :],
                other=0.0,
            )
            seen = stored[None, :]
            if part != 1:
                seen = key[None, :] <= position[:, None]
                if WINDOW is not None:
                    seen &= key[None, :] > position[:, None] - WINDOW
                # a weight of 0 doesn't hide a value that is not finite
                finite = tl.abs(values.to(tl.float32)) < float("inf")
                if tl.min(finite.to(tl.int32)) == 0:
                    spoilt = dot(seen.to(tl.float16), (~finite).to(tl.float16), INTERPRETED)
                    made = tl.where(spoilt > 0, float("nan"), made)
                    values = tl.where(finite, values, 0.0)
            top, total, made = attended(
                queries, keys, values, seen, scale, top, total, made, INTERPRETED
            )

    made = divided(top, total, made, sinks, head + tl.zeros([ROWS], tl.int32))
    at = ((first_query + row) * HEADS + head)[:, None] * CHANNELS + channel[None, :]
    tl.store(context + at, narrowed(made, context.dtype.element_ty, INTERPRETED), mask=real)
