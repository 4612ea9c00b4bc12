"""A decode step is the last query of an attention over whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerbisect.kernels.attention import attention
from layerbisect.kernels.attention_decode import attention_decode
from layerbisect.kernels.attention_rows import in_pages

LENGTHS = [9, 1, 0, 16, 17]


def heads(rows: int, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, count, 12, generator=generator, dtype=torch.float64)


def step(**changed: Any) -> tuple[torch.Tensor, ...]:
    k, v = heads(43, 2, 1), heads(43, 2, 2)
    k_cache, v_cache, table = in_pages(k, v, LENGTHS, slots=8)
    arguments: dict[str, Any] = {
        "q": heads(5, 4, 0),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": table,
        "lengths": torch.tensor(LENGTHS),
        "scale": 0.3,
    } | changed
    return attention_decode(**arguments), arguments["q"], k, v


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_a_step_is_the_last_query_of_its_sequence(
    window: int | None, sinks: torch.Tensor | None
) -> None:
    context, q, k, v = step(sliding_window=window, sinks=sinks)
    filled = torch.tensor([0, 1, 3, 4])
    expected = attention(
        q[filled],
        k,
        v,
        LENGTHS,
        scale=0.3,
        sliding_window=window,
        sinks=sinks,
        queries=[1, 1, 0, 1, 1],
    )
    assert torch.equal(context[filled], expected)
    assert not context[2].any()


def test_low_precision_rounds_as_attention_does() -> None:
    context, q, k, v = step(round_to=torch.bfloat16)
    alone = attention(
        q[3:4], k[10:26], v[10:26], [16], scale=0.3, queries=[1], round_to=torch.bfloat16
    )
    assert torch.equal(context[3:4], alone)
    assert torch.equal(context, context.bfloat16().double())


def test_pages_hold_every_row_once_and_nan_beside_them() -> None:
    k, v = heads(43, 2, 1), heads(43, 2, 2)
    k_cache, v_cache, table = in_pages(k, v, LENGTHS, slots=8)
    assert table.tolist() == [[1, 0, -1], [2, -1, -1], [-1, -1, -1], [4, 3, -1], [7, 6, 5]]
    assert torch.equal(k_cache[1], k[:8])
    assert torch.equal(v_cache[0][:1], v[8:9])
    assert torch.equal(v_cache[5][:1], v[42:43])
    for cache, rows in ((k_cache, k), (v_cache, v)):
        assert int(cache.isfinite().sum()) == rows.numel()


def test_a_batch_of_no_sequences_is_empty() -> None:
    k_cache, v_cache, table = in_pages(heads(0, 2, 1), heads(0, 2, 2), [])
    q = heads(0, 4, 0)
    lengths = torch.tensor([], dtype=torch.int32)
    assert attention_decode(q, k_cache, v_cache, table, lengths, scale=1.0).shape == (0, 4, 12)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="from 0 to the 24 slots of a table, got .9, 1, 0, 16, 25"):
        step(lengths=torch.tensor([9, 1, 0, 16, 25]))
    with pytest.raises(ValueError, match=r"sequence 1 has pages \[-1, -1\] of a cache of 8"):
        table = torch.tensor([[1, 0, 2], [-1, -1, -1], [-1, -1, -1], [4, 3, 2], [7, 6, 5]])
        step(lengths=torch.tensor([9, 9, 0, 16, 17]), page_table=table)
    with pytest.raises(ValueError, match=r"page_table must have shape \[5, page\]"):
        step(page_table=torch.zeros(4, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="3 heads cannot share 2 key heads evenly"):
        step(q=heads(5, 3, 0))
    with pytest.raises(ValueError, match=r"k_cache, v_cache \[page, slot, kv_head, channel\], got"):
        step(k_cache=heads(3, 2, 1))
    with pytest.raises(TypeError, match="q must be float32 or float64, got torch.bfloat16"):
        step(q=heads(5, 4, 0).bfloat16())
