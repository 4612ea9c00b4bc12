"""Rounding through a narrower dtype, and another draw of it."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels.rounding import rounded, shifted_grid


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_shifted_grid_draws_errors_of_the_same_size_anew(dtype: torch.dtype) -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # float16 has few numbers near zero
    x += x.sign() * 1e-3
    plain = (rounded(x, dtype) - x) / x.abs()
    unit = torch.finfo(dtype).eps / 2
    for scale in (0.55, 2**-0.5, 0.95):
        with shifted_grid(scale):
            other = (rounded(x, dtype) - x) / x.abs()
        assert float(other.abs().max()) <= unit
        assert float(other.std() / plain.std()) == pytest.approx(1.0, abs=0.1)
        assert abs(float(torch.corrcoef(torch.stack([plain, other]))[0, 1])) < 0.1
    assert torch.equal(rounded(x, dtype), x.to(dtype).double())


def test_what_is_not_rounded_stays() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    with shifted_grid(0.7):
        assert rounded(x, None) is x and rounded(x, torch.float32) is x
