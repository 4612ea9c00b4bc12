"""Causal softmax attention with grouped key and value heads.

    context = softmax(scale * q k^T, over the keys not after the query) v

(Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023, arXiv:2305.13245.) The
low-precision form rounds the products, the scaled scores, the probabilities and the context, as an
implementation does that writes each of them to memory; fused kernels keep most in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Attend within each sequence.

    ``q`` [row, head, channel], ``k`` and ``v`` [row, kv_head, channel], float32 or float64, after
    any q/k norm and rotary embedding. The rows are whole sequences of ``lengths`` tokens laid end
    to end. With ``sliding_window`` a query sees that many keys, its own included. Returns the
    context [row, head, channel]. Raises TypeError for another dtype and ValueError when the shapes
    or lengths don't fit.
    """
    require_compute_dtype("q", q)
    _check(q, k, v, lengths)
    context = torch.empty_like(q)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        context[rows] = _one_sequence(q[rows], k[rows], v[rows], scale, sliding_window, round_to)
        start += length
    return context


def _one_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    round_to: torch.dtype | None,
) -> torch.Tensor:
    length, heads, channels = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    # [kv_head, group, query, channel]: consecutive query heads share a key head
    queries = q.reshape(length, kv_heads, group, channels).permute(1, 2, 0, 3)
    keys = k.permute(1, 2, 0)
    values = v.permute(1, 0, 2)
    context = torch.empty_like(q)
    # a hidden value gets the weight 0, and 0 * nan is nan: then every query goes by itself
    most = QUERIES if bool(v.isfinite().all()) else 1
    step = max(1, min(most, SCORE_BYTES // max(1, heads * length * q.element_size())))
    for begin in range(0, length, step):
        end = min(begin + step, length)
        first = 0 if sliding_window is None else max(0, begin + 1 - sliding_window)
        chunk = queries[:, :, begin:end].reshape(kv_heads, group * (end - begin), channels)
        scores = rounded(torch.bmm(chunk, keys[:, :, first:end]), round_to)
        scores = rounded(scores * scale, round_to)
        scores = scores.view(kv_heads, group, end - begin, end - first)
        scores.masked_fill_(_hidden(begin, end, first, sliding_window, q.device), -torch.inf)
        weights = rounded(torch.softmax(scores, dim=-1), round_to)
        weights = weights.view(kv_heads, group * (end - begin), end - first)
        out = torch.bmm(weights, values[:, first:end])
        out = out.view(kv_heads, group, end - begin, channels).permute(2, 0, 1, 3)
        context[begin:end] = rounded(out.reshape(end - begin, heads, channels), round_to)
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


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        raise ValueError(
            "q must have shape [row, head, channel] and k, v [row, kv_head, channel], got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads cannot share {k.shape[1]} key heads evenly")
    if sum(lengths) != len(q) or min(lengths, default=0) < 0:
        raise ValueError(f"lengths must add up to the {len(q)} rows, got {list(lengths)}")
