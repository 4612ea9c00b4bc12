import math

import pytest
import torch

from layerbisect.kernels.bounds.common import (
    gamma,
    probable_gamma,
    smallest_subnormal,
    unit_roundoff,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_rounding_loses_at_most_the_unit_roundoff_and_nearly_all_of_it(
    dtype: torch.dtype,
) -> None:
    x = torch.linspace(1, 2, 10001, dtype=torch.float64)
    error = ((x.to(dtype).double() - x) / x).abs().max().item()
    u = unit_roundoff(dtype)
    assert 0 < error <= u
    # a hundredth past halfway from 1 to the next number, where the relative error is largest
    worst = torch.tensor(1 + 1.01 * u, dtype=torch.float64)
    assert float(worst.to(dtype).double() - worst) / u == pytest.approx(0.99, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_below_the_normal_numbers_half_a_subnormal_is_lost(dtype: torch.dtype) -> None:
    smallest = smallest_subnormal(dtype)
    assert torch.tensor(smallest, dtype=torch.float64).to(dtype).item() == smallest
    assert torch.tensor(0.49 * smallest, dtype=torch.float64).to(dtype).item() == 0
    assert torch.tensor(0.51 * smallest, dtype=torch.float64).to(dtype).item() == smallest


def test_gamma_holds_n_roundings_and_promises_nothing_where_they_reach_one() -> None:
    assert gamma(0, 2**-8) == 0
    assert gamma(3, 2**-24) == pytest.approx(3 * 2**-24, rel=1e-6)
    assert gamma(100, 2**-8) > (1 + 2**-8) ** 100 - 1
    assert gamma(256, 2**-8) == math.inf
    with pytest.raises(ValueError, match="-1"):
        gamma(-1, 2**-8)


def test_roundings_to_both_sides_add_up_like_a_root_and_never_to_more_than_all() -> None:
    u = 2**-24
    assert probable_gamma(10, u) == gamma(10, u)
    assert probable_gamma(10**6, u) == pytest.approx(8 * 10**3 * u, rel=0.01)
    assert probable_gamma(2**24, u) < math.inf
    generator = torch.Generator().manual_seed(0)
    terms = torch.rand(10**6, 8, generator=generator)
    # numpy sums term by term in float32, torch in float64
    error = torch.from_numpy(terms.numpy().cumsum(0)[-1]).double() / terms.double().sum(0) - 1
    assert 10 * u < float(error.abs().max()) < probable_gamma(10**6, u)
