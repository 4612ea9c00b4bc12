"""How rows of sequences are laid out for attention: end to end, and in pages as a KV cache is."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def checked_queries(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    queries: Sequence[int] | None,
    sinks: torch.Tensor | None,
) -> Sequence[int]:
    """Return each sequence's number of queries; raise ValueError for arguments that don't fit.

    ``q`` [query row, head, channel], ``k`` and ``v`` [key row, kv_head, channel], ``sinks`` [head].
    Sequences lie end to end: ``lengths`` are their numbers of keys, ``queries`` those of their
    queries, None for as many.
    """
    if (
        q.ndim != 3
        or k.ndim != 3
        or k.shape != v.shape
        or q.shape[2] != k.shape[2]
        or (queries is None and len(q) != len(k))
    ):
        raise ValueError(
            "q must have shape [row, head, channel] and k, v [row, kv_head, channel], got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    check_heads(q, k.shape[1], sinks)
    if sum(lengths) != len(k) or min(lengths, default=0) < 0:
        raise ValueError(f"lengths must add up to the {len(k)} rows, got {list(lengths)}")
    if queries is None:
        return lengths
    if len(queries) != len(lengths) or sum(queries) != len(q):
        raise ValueError(
            f"queries must be one number for each of {len(lengths)} sequences and add up to the "
            f"{len(q)} rows of q, got {list(queries)}"
        )
    if any(not 0 <= count <= length for count, length in zip(queries, lengths, strict=True)):
        raise ValueError(
            "a sequence's queries must be some of its keys' rows, got "
            f"queries={list(queries)} of lengths={list(lengths)}"
        )
    return queries


def check_heads(q: torch.Tensor, kv_heads: int, sinks: torch.Tensor | None) -> None:
    """Raise ValueError unless the heads of ``q`` share key heads evenly and have a sink each."""
    heads = q.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} key heads evenly")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape [{heads}], got {list(sinks.shape)}")


def check_pages(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Raise ValueError for arguments of a decode step whose shapes don't fit.

    Values of ``page_table`` and ``lengths`` are not read: they may lie on a device.
    """
    if (
        q.ndim != 3
        or k_cache.ndim != 4
        or k_cache.shape != v_cache.shape
        or q.shape[2] != k_cache.shape[3]
    ):
        raise ValueError(
            "q must have shape [sequence, head, channel] and k_cache, v_cache "
            f"[page, slot, kv_head, channel], got {list(q.shape)}, {list(k_cache.shape)}, "
            f"{list(v_cache.shape)}"
        )
    check_heads(q, k_cache.shape[2], sinks)
    if page_table.ndim != 2 or len(page_table) != len(q) or lengths.shape != (len(q),):
        raise ValueError(
            f"page_table must have shape [{len(q)}, page] and lengths [{len(q)}], got "
            f"{list(page_table.shape)} and {list(lengths.shape)}"
        )


def in_pages(
    k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], *, slots: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay keys and values [row, kv_head, channel] of whole sequences out as a paged cache has them.

    Returns caches [page, slot, kv_head, channel] and page_table int32 [sequence, page]. The last of
    a sequence's pages comes first, so that a kernel which reads on without its table is found out.
    What no token fills is NaN, and a page that a sequence does not have is -1.
    """
    counts = [-(-length // slots) for length in lengths]
    caches = [k.new_full((sum(counts), slots, *k.shape[1:]), torch.nan) for _ in range(2)]
    table = torch.full((len(lengths), max(counts, default=0)), -1, dtype=torch.int32)
    page = row = 0
    for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = torch.arange(page + count - 1, page - 1, -1)
        table[sequence, :count] = pages
        for cache, rows in zip(caches, (k, v), strict=True):
            padded = cache.new_full((count * slots, *k.shape[1:]), torch.nan)
            padded[:length] = rows[row : row + length]
            cache[pages.to(k.device)] = padded.unflatten(0, (count, slots))
        page, row = page + count, row + length
    return caches[0], caches[1], table.to(k.device)
