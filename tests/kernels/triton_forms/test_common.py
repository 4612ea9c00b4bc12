"""What the Triton forms share."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from layerbisect.kernels.triton_forms.common import aligned, interpreting, narrowed  # noqa: E402


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
