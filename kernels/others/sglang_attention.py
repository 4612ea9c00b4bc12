"""SGLang's Triton attention, called as its Triton backend calls it.

``extend`` is what a prefill runs, ``unified`` what it runs for deterministic inference, ``decode``
what a step of one token runs: keys in several splits, by the batch and its longest sequence, or in
splits of a fixed size for deterministic inference. Checked against SGLang 0.5.23, on a CPU under
Triton's interpreter, where the inner products round as on a GPU but their order is another; never
run by this project on a GPU.

SGLang's engine decodes every row of the batch with one query each. Here each row of q is such a
request, with the keys up to its own: so a whole prefill can be asked what decode would have given.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from layerbisect.kernels.others.common import refuse, sequences, starts

# SGLang's defaults: --triton-attention-num-kv-splits, and the tile of deterministic inference
KV_SPLITS = {"cuda": 8, "hip": 16}
SPLIT_TILE = 256


def extend(
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
    """Run extend_attention_fwd: keys before the queries from the cache, the others beside them."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    spans = sequences(lengths, queries)
    context = torch.empty_like(q)
    before = [list(range(keys.start, keys.start + count)) for _, keys, count in spans]
    own = [list(range(keys.start + count, keys.stop)) for _, keys, count in spans]
    fresh = torch.tensor(list(itertools.chain(*own)), dtype=torch.int64, device=q.device)
    extend_attention_fwd(
        q.contiguous(),
        k[fresh],
        v[fresh],
        context,
        k.contiguous(),
        v.contiguous(),
        starts([len(rows) for rows in own], q.device),
        starts([len(rows) for rows in before], q.device),
        _slots(before, q.device),
        None,
        True,
        None,
        max(map(len, own), default=0),
        1.0,
        1.0,
        sm_scale=scale,
        sliding_window_size=_window("sglang-triton-extend", sliding_window),
        sinks=sinks,
    )
    return context


def unified(
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
    """Run extend_attention_fwd_unified: all keys from the cache, in one order."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd_unified

    spans = sequences(lengths, queries)
    context = torch.empty_like(q)
    counts = [rows.stop - rows.start for rows, _, _ in spans]
    extend_attention_fwd_unified(
        q.contiguous(),
        context,
        k.contiguous(),
        v.contiguous(),
        1.0,
        1.0,
        starts(counts, q.device),
        starts(lengths, q.device),
        _slots([range(keys.start, keys.stop) for _, keys, _ in spans], q.device),
        torch.tensor([count for _, _, count in spans], dtype=torch.int32, device=q.device),
        max(counts, default=0),
        sm_scale=scale,
        sliding_window_size=_window("sglang-triton-unified", sliding_window),
        sinks=sinks,
    )
    return context


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    fixed_splits: bool,
    lengths: Sequence[int],
    scale: float,
    queries: Sequence[int] | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Run decode_attention_fwd with each row of ``q`` as one request."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    context = torch.empty_like(q)
    window = len(k) if sliding_window is None else sliding_window
    seen = [
        range(max(keys.start, last + 1 - window), last + 1)
        for _, keys, before in sequences(lengths, queries)
        for last in range(keys.start + before, keys.stop)
    ]
    counts = torch.tensor([len(slots) for slots in seen], dtype=torch.int32, device=q.device)
    splits, most = _splits(counts, q.shape[1], k.shape[1], fixed_splits)
    partial = (len(q), q.shape[1], most)
    decode_attention_fwd(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        context,
        starts([len(slots) for slots in seen], q.device),
        _slots(seen, q.device),
        torch.empty(*partial, v.shape[2], dtype=torch.float32, device=q.device),
        torch.empty(partial, dtype=torch.float32, device=q.device),
        splits,
        most,
        scale,
        1.0,
        1.0,
        sinks=sinks,
    )
    return context


def _splits(
    counts: torch.Tensor, heads: int, kv_heads: int, fixed_splits: bool
) -> tuple[torch.Tensor, int]:
    """Return each request's number of splits, int32, and the highest there may be."""
    import triton
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton
    from sglang.srt.utils.common import get_device_core_count

    if fixed_splits:
        splits = (counts + SPLIT_TILE - 1) // SPLIT_TILE
        return splits, int(splits.max()) if len(splits) else 1
    most = KV_SPLITS["hip" if torch.version.hip else "cuda"]
    cores = get_device_core_count() if counts.is_cuda else 0
    if cores <= 0:
        return torch.full_like(counts, most), most
    splits = torch.empty_like(counts)
    schedule = max(256, triton.next_power_of_2(len(counts)))
    arguments: tuple[Any, ...] = (splits, counts, len(counts), 1, heads, kv_heads, most, cores)
    get_num_kv_splits_triton[(1,)](*arguments, MAX_NUM_SEQ=schedule)
    return splits, most


def _window(name: str, sliding_window: int | None) -> int:
    # SGLang counts the keys before the query's own, and takes 0 of them for no window
    if sliding_window == 1:
        refuse(name, "sliding_window", sliding_window)
    return -1 if sliding_window is None else sliding_window - 1


def _slots(runs: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """The cache slots that the runs name, end to end; never empty, since a kernel takes it."""
    return torch.tensor(list(itertools.chain(*runs)) or [0], dtype=torch.int64, device=device)
