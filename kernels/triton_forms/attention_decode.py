"""Triton forms of a decode step's attention over a paged KV cache.

A program holds the query heads that share a key head. The fast form cuts a sequence's keys into
splits that run side by side and are then combined (Dao et al. 2023, Flash-Decoding): how many
depends on the batch, and so do a row's bits. The deterministic form has one split, and tiles as
those of the deterministic prefill, with the bits of which it agrees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from layerbisect.kernels.attention_rows import check_pages, checked_queries, in_pages
from layerbisect.kernels.triton_forms.attention_tiles import (
    attended,
    check_supported,
    divided,
    tiles,
    width,
)
from layerbisect.kernels.triton_forms.common import Build, aligned, interpreting, narrowed

MOST_SPLITS = 8
# programs that fill a large GPU's processors about twice
PROGRAMS = 256


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool,
    splits: int | None = None,
) -> torch.Tensor:
    """Attend from each sequence's last token, as `layerbisect.kernels.attention_decode` says.

    ``q`` and the caches in bfloat16, float16 or float32, and so the context. ``splits``, from 1 to
    8, is for the fast form; None lets it choose by the batch and by the pages of a table. Raises
    Unsupported for other dtypes and more than 256 channels, ValueError for shapes or splits that
    don't fit. What ``page_table`` and ``lengths`` hold is not checked.
    """
    check_pages(q, k_cache, v_cache, page_table, lengths, sinks)
    check_supported(q, k_cache, v_cache)
    q, k_cache, v_cache = aligned(q), aligned(k_cache), aligned(v_cache)
    sequences, heads, channels = q.shape
    slots, kv_heads = k_cache.shape[1:3]
    room = page_table.shape[1] * slots
    rows, keys = tiles(q, heads // kv_heads, deterministic)
    head_tiles = triton.cdiv(heads // kv_heads, rows)
    if splits is None:
        wanted = 1 if deterministic else PROGRAMS // max(1, sequences * kv_heads * head_tiles)
        splits = max(1, min(MOST_SPLITS, wanted, triton.cdiv(room, keys)))
    elif not 1 <= splits <= (1 if deterministic else MOST_SPLITS):
        raise ValueError(
            f"splits must be from 1 to {MOST_SPLITS}, and 1 in the deterministic form, got {splits}"
        )
    context = torch.empty_like(q)
    if not sequences:
        return context
    # of each split
    parts = q.new_empty(sequences, heads, splits, channels, dtype=torch.float32)
    tops = q.new_empty(sequences, heads, splits, dtype=torch.float32)
    totals = torch.empty_like(tops)
    sinks = None if sinks is None else aligned(sinks)
    shape = {
        "HEADS": heads,
        "CHANNELS": channels,
        "SPLITS": splits,
        "ROWS": rows,
        "WIDTH": width(channels),
        "INTERPRETED": interpreting(),
        "enable_fp_fusion": False,
    }
    _decode[(sequences, kv_heads * head_tiles, splits)](
        q,
        k_cache,
        v_cache,
        aligned(page_table),
        aligned(lengths),
        parts,
        tops,
        totals,
        scale * math.log2(math.e),
        page_table.shape[1],
        SLOTS=slots,
        KV_HEADS=kv_heads,
        WINDOW=sliding_window,
        KEYS=keys,
        num_stages=2,
        **shape,
    )
    _combine[(sequences, triton.cdiv(heads, rows))](parts, tops, totals, sinks, context, **shape)
    return context


def attention_by_decode(
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
    """Attend as attention does, each query by a decode step over the keys up to its own.

    A step takes the next query of every sequence that has one left.
    """
    counts = checked_queries(q, k, v, lengths, queries, sinks)
    check_supported(q, k, v)
    k_cache, v_cache, page_table = in_pages(k, v, lengths)
    slots = k_cache.shape[1]
    context = torch.empty_like(q)
    starts = [sum(counts[:sequence]) for sequence in range(len(counts))]
    for step in range(max(counts, default=0)):
        alive = [sequence for sequence, count in enumerate(counts) if step < count]
        rows = [starts[sequence] + step for sequence in alive]
        seen = [lengths[sequence] - counts[sequence] + step + 1 for sequence in alive]
        context[rows] = attention_decode(
            q[rows],
            k_cache,
            v_cache,
            page_table[alive, : -(-max(seen) // slots)],
            torch.tensor(seen, dtype=torch.int32, device=q.device),
            scale=scale,
            sliding_window=sliding_window,
            sinks=sinks,
            deterministic=deterministic,
        )
    return context


def builds() -> list[Build]:
    """Return what to compile without a GPU: a model with grouped heads, and one with sinks."""
    made = []
    for name, channels, window in (("", 128, None), (" window and sinks", 64, 128)):
        q = torch.empty(0, 64, channels, dtype=torch.bfloat16)
        for form, splits in (("deterministic", 1), ("fast", 8)):
            rows, keys = tiles(q, 8, splits == 1)
            shape = {
                "HEADS": 64,
                "CHANNELS": channels,
                "SPLITS": splits,
                "ROWS": rows,
                "WIDTH": width(channels),
                "INTERPRETED": False,
            }
            parts = dict.fromkeys(("parts", "tops", "totals"), "*fp32")
            tensors = dict.fromkeys(("q", "k_cache", "v_cache"), "*bf16") | parts
            tables = {"page_table": "*i32", "lengths": "*i32", "scale": "fp32", "pages": "i32"}
            cache = {"SLOTS": 16, "KV_HEADS": 8, "WINDOW": window, "KEYS": keys}
            made.append(
                Build(f"attention_decode {form}{name}", _decode, tensors | tables, shape | cache)
            )
            sinks = {"sinks": "*bf16"} if window else {}
            made.append(
                Build(
                    f"attention_decode {form} combine{name}",
                    _combine,
                    parts | sinks | {"context": "*bf16"},
                    shape | ({} if window else {"sinks": None}),
                )
            )
    return made


# a table of one page must not be compiled for itself
@triton.jit(do_not_specialize=["pages"])  # type: ignore[untyped-decorator]
def _decode(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page_table: tl.tensor,
    lengths: tl.tensor,
    parts: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    scale: tl.tensor,
    pages: tl.tensor,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """What the keys of one split make of a tile of the heads that share a key head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // HEAD_TILES
    split = tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)

    member = tl.program_id(1) % HEAD_TILES * ROWS + tl.arange(0, ROWS)
    head = sequence * HEADS + kv_head * GROUP + member
    channel = tl.arange(0, WIDTH)
    real = (member < GROUP)[:, None] & (channel < CHANNELS)[None, :]
    at = head[:, None] * CHANNELS + channel[None, :]
    queries = tl.load(q + at, mask=real, other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    made = tl.zeros([ROWS, WIDTH], tl.float32)
    lowest = 0
    if WINDOW is not None:
        lowest = tl.maximum(length - WINDOW, 0)
    first = lowest // KEYS
    each = tl.cdiv(tl.cdiv(length, KEYS) - first, SPLITS) * KEYS
    first = first * KEYS + split * each
    for start in range(first, tl.minimum(first + each, length), KEYS):
        key = start + tl.arange(0, KEYS)
        seen = (key >= lowest) & (key < length)
        page = tl.load(page_table + sequence * pages + key // SLOTS, mask=seen, other=0)
        slot = page.to(tl.int64) * SLOTS + key % SLOTS
        of_key = (slot * KV_HEADS + kv_head) * CHANNELS
        keys = tl.load(
            k_cache + of_key[None, :] + channel[:, None],
            mask=seen[None, :] & (channel < CHANNELS)[:, None],
            other=0.0,
        )
        values = tl.load(
            v_cache + of_key[:, None] + channel[None, :],
            mask=seen[:, None] & (channel < CHANNELS)[None, :],
            other=0.0,
        )
        top, total, made = attended(
            queries, keys, values, seen[None, :], scale, top, total, made, INTERPRETED
        )

    part = head * SPLITS + split
    tl.store(tops + part, top, mask=member < GROUP)
    tl.store(totals + part, total, mask=member < GROUP)
    tl.store(parts + part[:, None] * CHANNELS + channel[None, :], made, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(
    parts: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    sinks: tl.tensor,
    context: tl.tensor,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """The context of a tile of a sequence's heads, from what their splits have made."""
    member = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    stored = member < HEADS
    head = tl.program_id(0).to(tl.int64) * HEADS + member
    channel = tl.arange(0, WIDTH)
    real = stored[:, None] & (channel < CHANNELS)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    made = tl.zeros([ROWS, WIDTH], tl.float32)
    for split in range(SPLITS):
        at = head * SPLITS + split
        other = tl.load(tops + at, mask=stored, other=float("-inf"))
        higher = tl.maximum(top, other)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, taken = tl.exp2(top - base), tl.exp2(other - base)
        total = total * kept + tl.load(totals + at, mask=stored, other=0.0) * taken
        part = tl.load(parts + at[:, None] * CHANNELS + channel[None, :], mask=real, other=0.0)
        made = made * kept[:, None] + part * taken[:, None]
        top = higher
    made = divided(top, total, made, sinks, tl.where(stored, member, 0))
    at = head[:, None] * CHANNELS + channel[None, :]
    tl.store(context + at, narrowed(made, context.dtype.element_ty, INTERPRETED), mask=real)
