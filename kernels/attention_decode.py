"""Attention of a decode step: one query a sequence, over keys and values kept in pages.

The same formula and roundings as `layerbisect.kernels.attention`, whose last query this is. Pages:
Kwon et al. 2023, arXiv:2309.06180.
"""

from __future__ import annotations

import torch

from layerbisect.kernels.attention import attention
from layerbisect.kernels.attention_rows import check_pages
from layerbisect.kernels.rounding import require_compute_dtype


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
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Attend from each sequence's last token, whose key and value are in the cache already.

    ``q`` [sequence, head, channel], float32 or float64; ``k_cache`` and ``v_cache`` [page, slot,
    kv_head, channel] of any float dtype. Token t of a sequence is in the page that ``page_table``
    int [sequence, page] gives at t // slots, in slot t % slots; ``lengths`` int [sequence] counts a
    sequence's tokens, and table entries past them are not read. ``sliding_window`` and ``sinks`` as
    in attention. Returns the context [sequence, head, channel], 0 for a sequence without tokens.
    Raises TypeError for another dtype and ValueError when shapes, lengths or pages don't fit.
    """
    require_compute_dtype("q", q)
    check_pages(q, k_cache, v_cache, page_table, lengths, sinks)
    pages, slots = k_cache.shape[:2]
    room = page_table.shape[1] * slots
    counts = [int(length) for length in lengths]
    if not all(0 <= count <= room for count in counts):
        raise ValueError(f"lengths must be from 0 to the {room} slots of a table, got {counts}")
    used = [row[: -(-count // slots)] for row, count in zip(page_table.long(), counts, strict=True)]
    for sequence, row in enumerate(used):
        if len(row) and not 0 <= int(row.min()) <= int(row.max()) < pages:
            raise ValueError(f"sequence {sequence} has pages {row.tolist()} of a cache of {pages}")

    def rows(cache: torch.Tensor) -> torch.Tensor:
        kept = [cache[row].flatten(0, 1)[:n] for row, n in zip(used, counts, strict=True)]
        return torch.cat([cache.new_empty(0, *cache.shape[2:]), *kept]).to(q.dtype)

    context = torch.zeros_like(q)
    filled = torch.tensor([count > 0 for count in counts], dtype=torch.bool, device=q.device)
    context[filled] = attention(
        q[filled],
        rows(k_cache),
        rows(v_cache),
        counts,
        scale=scale,
        sliding_window=sliding_window,
        queries=[min(count, 1) for count in counts],
        sinks=sinks,
        round_to=round_to,
    )
    return context
