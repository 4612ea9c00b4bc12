"""Attention against a loop over queries, and its independence of chunks and neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerbisect.kernels import attention as module
from layerbisect.kernels.attention import attention
from layerbisect.kernels.bounds.attention import attention_bound


def heads(rows: int, count: int, channels: int = 20, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, count, channels, generator=generator, dtype=torch.float64)


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence, one query and one head at a time."""
    context = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for row in range(len(q)):
        first = 0 if window is None else max(0, row + 1 - window)
        for head in range(q.shape[1]):
            keys, values = k[first : row + 1, head // group], v[first : row + 1, head // group]
            weights = torch.exp(scale * keys @ q[row, head])
            sink = 0.0 if sinks is None else torch.exp(sinks[head])
            context[row, head] = weights @ values / (weights.sum() + sink)
    return context


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (6, 2), (4, 4)])
def test_attention_follows_its_formula(q_heads: int, kv_heads: int, window: int | None) -> None:
    q, k, v = heads(13, q_heads), heads(13, kv_heads, seed=1), heads(13, kv_heads, seed=2)
    context = attention(q, k, v, [13], scale=0.3, sliding_window=window)
    torch.testing.assert_close(context, by_hand(q, k, v, 0.3, window))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("queries", [1, 3, 7])
def test_chunks_of_queries_change_nothing(
    queries: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = heads(17, 4), heads(17, 2, seed=1), heads(17, 2, seed=2)
    whole = attention(q, k, v, [17], scale=0.2, sliding_window=window)
    monkeypatch.setattr(module, "SCORE_BYTES", queries * 17 * 4 * 8)
    torch.testing.assert_close(
        attention(q, k, v, [17], scale=0.2, sliding_window=window), whole, rtol=1e-12, atol=1e-14
    )


def test_each_sequence_sees_itself_only() -> None:
    lengths = [5, 0, 1, 9]
    q, k, v = heads(15, 4), heads(15, 2, seed=1), heads(15, 2, seed=2)
    packed = attention(q, k, v, lengths, scale=0.2)
    parts = zip(*(torch.split(x, lengths) for x in (q, k, v)), strict=True)
    alone = [attention(q, k, v, [len(q)], scale=0.2) for q, k, v in parts]
    assert torch.equal(packed, torch.cat(alone))


@pytest.mark.parametrize("window", [None, 4])
def test_a_sink_takes_weight_and_has_no_value(window: int | None) -> None:
    q, k, v = heads(9, 4), heads(9, 2, seed=1), heads(9, 2, seed=2)
    sinks = torch.tensor([0.5, -1.0, 3.0, -torch.inf])
    context = attention(q, k, v, [9], scale=0.3, sliding_window=window, sinks=sinks)
    torch.testing.assert_close(context, by_hand(q, k, v, 0.3, window, sinks.double()))
    without = attention(q, k, v, [9], scale=0.3, sliding_window=window)
    torch.testing.assert_close(context[:, 3], without[:, 3])


@pytest.mark.parametrize("window", [None, 3])
def test_queries_are_the_last_of_their_sequence(window: int | None) -> None:
    lengths, queries = [9, 4, 1, 6, 0], [2, 4, 1, 0, 0]
    q, k, v = heads(20, 4), heads(20, 2, seed=1), heads(20, 2, seed=2)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0]).double()
    whole = attention(q, k, v, lengths, scale=0.3, sliding_window=window, sinks=sinks)
    rows = torch.tensor([7, 8, 9, 10, 11, 12, 13])
    last = attention(
        q[rows], k, v, lengths, scale=0.3, sliding_window=window, sinks=sinks, queries=queries
    )
    torch.testing.assert_close(last, whole[rows], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("later", [100.0, torch.nan, torch.inf])
def test_later_tokens_do_not_reach_earlier_rows(later: float) -> None:
    q, k, v = heads(8, 2), heads(8, 2, seed=1), heads(8, 2, seed=2)
    before = attention(q, k, v, [8], scale=0.2)
    for x in (q, k, v):
        x[5:] = later
    torch.testing.assert_close(attention(q, k, v, [8], scale=0.2)[:5], before[:5])


def test_large_scores_do_not_overflow() -> None:
    q, k, v = heads(6, 1) * 1e4, heads(6, 1, seed=1) * 1e4, heads(6, 1, seed=2)
    assert attention(q.float(), k.float(), v.float(), [6], scale=1.0).isfinite().all()


def test_low_precision_rounds_scores_probabilities_and_context() -> None:
    q, k, v = (heads(9, 1, seed=seed).bfloat16() for seed in range(3))
    scores = (q[:, 0] @ k[:, 0].T) * 0.25
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    expected = scores.float().softmax(-1).bfloat16() @ v[:, 0]
    rough = attention(q.float(), k.float(), v.float(), [9], scale=0.25, round_to=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert torch.equal(rough, rough.bfloat16().float())
    # sums in another order may round to the neighbouring bfloat16
    torch.testing.assert_close(rough[:, 0], expected.float(), rtol=2**-7, atol=2**-9)


def test_wrong_arguments_are_named() -> None:
    q, k = heads(4, 6), heads(4, 4)
    with pytest.raises(ValueError, match="6 heads cannot share 4 key heads"):
        attention(q, k, k, [4], scale=1.0)
    with pytest.raises(ValueError, match=r"lengths must add up to the 4 rows, got \[3\]"):
        attention(q, q, q, [3], scale=1.0)
    with pytest.raises(ValueError, match=r"lengths must add up to the 4 rows, got \[5, -1\]"):
        attention(q, q, q, [5, -1], scale=1.0)
    with pytest.raises(ValueError, match=r"got \[4, 6, 20\], \[4, 4, 20\], \[4, 6, 20\]"):
        attention(q, k, q, [4], scale=1.0)
    with pytest.raises(TypeError, match="q must be float32 or float64, got torch.float16"):
        attention(q.half(), k.half(), k.half(), [4], scale=1.0)
    with pytest.raises(ValueError, match=r"add up to the 4 rows of q, got \[3\]"):
        attention(q, q, q, [4], scale=1.0, queries=[3])
    with pytest.raises(ValueError, match=r"got queries=\[3, 1\] of lengths=\[2, 2\]"):
        attention(q, q, q, [2, 2], scale=1.0, queries=[3, 1])
    with pytest.raises(ValueError, match=r"sinks must have shape \[6\], got \[4\]"):
        attention(q, q, q, [4], scale=1.0, sinks=torch.zeros(4))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torch_and_transformers_attend_alike(dtype: torch.dtype, window: int | None) -> None:
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    q, k, v = (x.to(dtype) for x in (heads(13, 6), heads(13, 2, seed=1), heads(13, 2, seed=2)))
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0, 1.0, -2.0]).to(dtype)
    key, query = torch.arange(13)[None, :], torch.arange(13)[:, None]
    seen = (key <= query) & (key > query - (window or 13))
    mask = torch.zeros(13, 13, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    # [batch, head, row, channel]
    rows = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    layer: Any = torch.nn.Module()
    layer.num_key_value_groups = 3
    layer.sinks = sinks
    layer.eval()
    found = {
        "sdpa": torch.nn.functional.scaled_dot_product_attention(
            *rows, attn_mask=seen, scale=0.3, enable_gqa=True
        ).transpose(1, 2),
        "eager": qwen3.eager_attention_forward(layer, *rows, mask, scaling=0.3)[0],
        "sinks": gpt_oss.eager_attention_forward(layer, *rows, mask, scaling=0.3)[0],
    }
    for name, context in found.items():
        given: dict[str, Any] = {"scale": 0.3, "sliding_window": window}
        given["sinks"] = sinks if name == "sinks" else None
        exact = attention(q.double(), k.double(), v.double(), [13], **given)
        if dtype == torch.float64:
            # transformers' softmax is in float32
            torch.testing.assert_close(context[0], exact, rtol=1e-6, atol=1e-7)
        else:
            error = (context[0].double() - exact).abs()
            assert (error <= attention_bound(q, k, v, [13], **given, dtype=dtype)).all(), name
            assert error.max() > 0
