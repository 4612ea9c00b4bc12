"""The Triton forms of a decode step: right in any number of splits, and a prefill's last row."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels.attention_rows import in_pages
from layerbisect.kernels.replay.implementation import Unsupported
from tests.kernels.triton_forms.attention_cases import DTYPES, made, made_sinks, of_bound

pytest.importorskip("triton")

from layerbisect.kernels.triton_forms import attention_decode as module  # noqa: E402
from layerbisect.kernels.triton_forms.attention import attention  # noqa: E402
from layerbisect.kernels.triton_forms.attention_decode import (  # noqa: E402
    attention_by_decode,
    attention_decode,
)


@pytest.mark.parametrize(("deterministic", "splits"), [(True, None), (False, 1), (False, 8)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "channels", "window", "with_sinks"),
    [(1, 1, 60, None, False), (6, 2, 128, 100, True), (20, 1, 60, None, True)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_exact_within_the_bound(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    channels: int,
    window: int | None,
    with_sinks: bool,
    deterministic: bool,
    splits: int | None,
    device: str,
) -> None:
    lengths = [63, 1, 0, 130]
    q, k, v = made(sum(lengths), heads, kv_heads, channels, dtype, device)
    q, sinks = q[:4], made_sinks(heads, dtype, device) if with_sinks else None
    # beside the rows the pages hold nan, and no page is 0 for lack of another
    y = attention_decode(
        q,
        *in_pages(k, v, lengths),
        torch.tensor(lengths, device=device),
        scale=0.15,
        sliding_window=window,
        sinks=sinks,
        deterministic=deterministic,
        splits=splits,
    )
    assert y.dtype == dtype and y.shape == q.shape
    assert not y[2].any()
    filled, queries = [0, 1, 3], [1, 1, 0, 1]
    given = (q[filled], k, v, lengths, 0.15, window, queries, sinks)
    assert bool((of_bound(y[filled], *given) <= 1).all())


@pytest.mark.parametrize("slots", [1, 16, 100])
def test_pages_of_any_size_give_the_same_bits(slots: int, device: str) -> None:
    q, k, v = made(150, 2, 1, 60, torch.float32, device)
    y = attention_decode(
        q[149:],
        *in_pages(k, v, [150], slots=slots),
        torch.tensor([150], device=device),
        scale=0.15,
        deterministic=True,
    )
    whole = attention(q, k, v, [150], scale=0.15, deterministic=True)
    assert torch.equal(y, whole[149:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fast_gives_other_bits_in_another_batch_and_deterministic_the_same(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # short sequences leave a long one fewer splits
    monkeypatch.setattr(module, "PROGRAMS", 8)
    lengths = [512, 1, 1, 1]
    q, k, v = made(sum(lengths), 2, 1, 60, dtype, device)
    k_cache, v_cache, table = in_pages(k, v, lengths)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)

    def step(sequences: slice, deterministic: bool, splits: int | None = None) -> torch.Tensor:
        return attention_decode(
            q[sequences],
            k_cache,
            v_cache,
            table[sequences],
            counts[sequences],
            scale=0.15,
            deterministic=deterministic,
            splits=splits,
        )

    batch, alone = slice(0, 4), slice(0, 1)
    assert torch.equal(step(batch, True)[:1], step(alone, True))
    assert not torch.equal(step(batch, False)[:1], step(alone, False))
    assert not torch.equal(step(alone, False, splits=1), step(alone, False, splits=8))
    assert torch.equal(step(alone, False), step(alone, False, splits=8))


def test_a_prefill_by_decode_steps_is_a_prefill(device: str) -> None:
    lengths, queries = [7, 0, 20, 3], [2, 0, 4, 3]
    q, k, v = made(30, 2, 1, 60, torch.bfloat16, device)
    sinks = made_sinks(2, torch.bfloat16, device)
    for deterministic in (False, True):
        y = attention_by_decode(
            q[:9],
            k,
            v,
            lengths,
            scale=0.15,
            sliding_window=9,
            queries=queries,
            sinks=sinks,
            deterministic=deterministic,
        )
        given = (q[:9], k, v, lengths, 0.15, 9, queries, sinks)
        assert bool((of_bound(y, *given) <= 1).all())


def test_refuses_what_it_cannot_do(device: str) -> None:
    q, k, v = made(8, 2, 1, 60, torch.float32, device)
    pages, lengths = in_pages(k, v, [8]), torch.tensor([8], device=device)
    with pytest.raises(ValueError, match="splits must be from 1 to 8, and 1 in .*, got 9"):
        attention_decode(q[:1], *pages, lengths, scale=1.0, deterministic=False, splits=9)
    with pytest.raises(ValueError, match="splits must be from 1 to 8, and 1 in .*, got 2"):
        attention_decode(q[:1], *pages, lengths, scale=1.0, deterministic=True, splits=2)
    with pytest.raises(ValueError, match=r"page_table must have shape \[2, page\]"):
        attention_decode(q[:2], *pages, lengths, scale=1.0, deterministic=True)
    with pytest.raises(Unsupported, match="got torch.float16, torch.float32, torch.float32"):
        attention_decode(q[:1].half(), *pages, lengths, scale=1.0, deterministic=True)
