"""The bound of attention: what rounds as it allows stays within, and what is wrong doesn't."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerbisect.kernels.attention import attention
from layerbisect.kernels.bounds.attention import attention_bound

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [40, 0, 23]


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def made(dtype: torch.dtype, size: float = 1.0) -> QKV:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(63, heads, 20, generator=generator) for heads in (4, 2, 2))
    return (size * q).to(dtype), k.to(dtype), v.to(dtype)


def wide(qkv: QKV, compute: torch.dtype = torch.float64) -> QKV:
    q, k, v = qkv
    return q.to(compute), k.to(compute), v.to(compute)


def ratio(y: torch.Tensor, qkv: QKV, **changed: Any) -> torch.Tensor:
    """Error as a multiple of the bound."""
    given: dict[str, Any] = {"lengths": LENGTHS, "scale": 0.2} | changed
    exact = attention(*wide(qkv), **given)
    return (y.double() - exact).abs() / attention_bound(*qkv, **given, dtype=qkv[0].dtype)


# large queries make scores of 100, which a narrow dtype doesn't know to within 1
@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_low_precision_stays_within_and_comes_near(
    dtype: torch.dtype, with_sinks: bool, window: int | None, size: float
) -> None:
    qkv = made(dtype, size)
    sinks = torch.tensor([0.5, -1.0, 3.0, -torch.inf]).to(dtype) if with_sinks else None
    changed: dict[str, Any] = {"sliding_window": window, "sinks": sinks}
    compute = torch.float32 if dtype == torch.float32 else torch.float64
    low = attention(*wide(qkv, compute), LENGTHS, scale=0.2, **changed, round_to=dtype)
    found = ratio(low, qkv, **changed)
    assert found.max() <= 1
    # worst cases of many roundings don't meet
    assert found.max() > (0.005 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_scale_does_not_stay_within(dtype: torch.dtype) -> None:
    qkv = made(dtype)
    scale = 0.2 * (1.001 if dtype == torch.float32 else 1.3)
    wrong = attention(*wide(qkv), LENGTHS, scale=scale).to(dtype)
    assert (ratio(wrong, qkv) > 1).float().mean() > 0.3


def test_a_row_has_the_bound_of_its_own_keys() -> None:
    q, k, v = made(torch.bfloat16)
    given: dict[str, Any] = {"scale": 0.2, "dtype": torch.bfloat16}
    whole = attention_bound(q, k, v, LENGTHS, **given)
    chunk = attention_bound(q[30:40], k[:40], v[:40], [40], **given, queries=[10])
    torch.testing.assert_close(chunk, whole[30:40])
    k[12:], v[12:] = torch.nan, torch.nan
    poisoned = attention_bound(q, k, v, LENGTHS, **given)
    torch.testing.assert_close(poisoned[:12], whole[:12])


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"add up to the 63 rows, got \[3\]"):
        attention_bound(*made(torch.float32), [3], scale=1.0, dtype=torch.float32)
