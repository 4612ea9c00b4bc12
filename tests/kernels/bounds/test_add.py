from __future__ import annotations

import pytest
import torch

from layerbisect.kernels.bounds.add import add_bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_holds_and_is_nearly_reached(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    stream, delta = (torch.randn(99, 60, generator=generator).to(dtype) for _ in range(2))
    exact = stream.double() + delta.double()
    bound = add_bound(stream, delta, dtype=dtype)
    share = ((stream + delta).double() - exact).abs() / bound
    assert 0.45 < float(share.max()) <= 1
    # what a rounding can't hide
    assert bool((((1.02 * exact).to(dtype).double() - exact).abs() > bound).any())
