"""Causal softmax attention with grouped key and value heads.

    context = softmax(scale * q k^T, over the keys not after the query) v

(Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023, arXiv:2305.13245.) A
sink is a head's learned logit that takes part in the softmax and has no value, as in gpt-oss. The
low-precision form rounds the products, the scaled scores, the probabilities and the context, as an
implementation does that writes each of them to memory; fused kernels keep most in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerbisect.kernels.attention_rows import checked_queries
from layerbisect.kernels.rounding import require_compute_dtype, rounded

# scores held at once; a few temporaries of the same size live beside them
SCORE_BYTES = 64 * 2**20
# queries taken at once where more would fit: keys after the last of them needn't be computed
QUERIES = 256


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
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Attend within each sequence.

    ``q`` [query row, head, channel], ``k`` and ``v`` [key row, kv_head, channel], float32 or
    float64, after any q/k norm and rotary embedding. Sequences of ``lengths`` keys lie end to end,
    each with a query for every key, or for its last ones: so many as ``queries`` says, as in a
    chunked prefill or a decode step. With ``sliding_window`` a query sees that many keys, its own
    included. ``sinks`` [head] are logits that are added to the softmax's denominator only. Returns
    the context [query row, head, channel]. Raises TypeError for another dtype and ValueError when
    the shapes or lengths don't fit.
    """
    require_compute_dtype("q", q)
    counts = checked_queries(q, k, v, lengths, queries, sinks)
    context = torch.empty_like(q)
    start = key_start = 0
    for count, length in zip(counts, lengths, strict=True):
        rows, keys = slice(start, start + count), slice(key_start, key_start + length)
        context[rows] = _one_sequence(
            q[rows], k[keys], v[keys], scale, sliding_window, sinks, round_to
        )
        start, key_start = start + count, key_start + length
    return context


def _one_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    round_to: torch.dtype | None,
) -> torch.Tensor:
    count, heads, channels = q.shape
    length, kv_heads = k.shape[:2]
    group = heads // kv_heads
    # [kv_head, group, query, channel]: consecutive query heads share a key head
    queries = q.reshape(count, kv_heads, group, channels).permute(1, 2, 0, 3)
    keys = k.permute(1, 2, 0)
    values = v.permute(1, 0, 2)
    context = torch.empty_like(q)
    # a hidden value gets the weight 0, and 0 * nan is nan: then every query goes by itself
    most = QUERIES if bool(v.isfinite().all()) else 1
    step = max(1, min(most, SCORE_BYTES // max(1, heads * length * q.element_size())))
    for begin in range(length - count, length, step):
        end = min(begin + step, length)
        first = 0 if sliding_window is None else max(0, begin + 1 - sliding_window)
        rows = slice(begin - (length - count), end - (length - count))
        chunk = queries[:, :, rows].reshape(kv_heads, group * (end - begin), channels)
        scores = rounded(torch.bmm(chunk, keys[:, :, first:end]), round_to)
        scores = rounded(scores * scale, round_to)
        scores = scores.view(kv_heads, group, end - begin, end - first)
        scores.masked_fill_(_hidden(begin, end, first, sliding_window, q.device), -torch.inf)
        if sinks is not None:
            sink = sinks.to(q.dtype).view(kv_heads, group, 1, 1)
            scores = torch.cat([scores, sink.expand(-1, -1, end - begin, 1)], dim=-1)
        weights = rounded(torch.softmax(scores, dim=-1), round_to)[..., : end - first]
        weights = weights.reshape(kv_heads, group * (end - begin), end - first)
        out = torch.bmm(weights, values[:, first:end])
        out = out.view(kv_heads, group, end - begin, channels).permute(2, 0, 1, 3)
        context[rows] = rounded(out.reshape(end - begin, heads, channels), round_to)
    return context


def _hidden(
    begin: int, end: int, first: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor:
    """Which keys [first, end) each query [begin, end) must not see: bool [query, key]."""
    query = torch.arange(begin, end, device=device)[:, None]
    key = torch.arange(first, end, device=device)[None, :]
    hidden = key > query
    if sliding_window is not None:
        hidden |= key <= query - sliding_window
    return hidden
