"""What the Triton forms share."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from layerbisect.kernels.triton_forms.common import (  # noqa: E402
    aligned,
    dot,
    interpreting,
    narrowed,
)


@triton.jit  # type: ignore[untyped-decorator]
def narrow(x: tl.tensor, y: tl.tensor, COUNT: tl.constexpr, INTERPRETED: tl.constexpr) -> None:
    at = tl.arange(0, COUNT)
    tl.store(y + at, narrowed(tl.load(x + at), y.dtype.element_ty, INTERPRETED))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_narrowed_to_the_nearest_a_tie_to_even(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    # ties, carries into the exponent, and what is no number
    x[:10] = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, 1.9999, -3.9999, 0.0, -0.0, 6e4, *map(float, ("inf", "-inf"))]
        + [torch.nan]
    )
    x = x.to(device)
    y = torch.empty_like(x, dtype=dtype)
    narrow[(1,)](x, y, COUNT=len(x), INTERPRETED=interpreting())
    torch.testing.assert_close(y, x.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_rows_of_a_batch_are_moved_to_where_a_batch_would_begin() -> None:
    x = torch.randn(4, 60).bfloat16()
    assert aligned(x).data_ptr() == x.data_ptr()
    for other in (x[1:], x[:, 1:], x.T):
        moved = aligned(other)
        assert moved.is_contiguous() and moved.data_ptr() % 16 == 0
        assert torch.equal(moved, other)


@triton.jit  # type: ignore[untyped-decorator]
def multiply(a: tl.tensor, b: tl.tensor, y: tl.tensor, INTERPRETED: tl.constexpr) -> None:
    row, k, column = tl.arange(0, 64), tl.arange(0, 128), tl.arange(0, 32)
    product = dot(
        tl.load(a + row[:, None] * 128 + k[None, :]),
        tl.load(b + k[:, None] * 32 + column[None, :]),
        INTERPRETED,
    )
    tl.store(y + row[:, None] * 32 + column[None, :], product)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_has_the_same_product_wherever_it_lies_in_a_tile(
    dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(64, 128, generator=generator).to(dtype)
    b = torch.randn(128, 32, generator=generator).to(dtype)
    a[1:] = torch.where(torch.arange(1, 64)[:, None] % 3 == 0, a[1:], a[0])
    y = torch.empty(64, 32, device=device)
    multiply[(1,)](a.to(device), b.to(device), y, INTERPRETED=interpreting())
    exact = a.double() @ b.double()
    lost = 128 * 2**-24 * (a.double().abs() @ b.double().abs())
    assert ((y.cpu() - exact).abs() <= lost).all()
    assert torch.equal(y[1::3], y[:1].expand(21, -1))
