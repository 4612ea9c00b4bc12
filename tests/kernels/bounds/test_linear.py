"""The bound of a linear projection holds for any order of summation, and not for wrong ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from layerbisect.kernels.bounds.linear import linear_bound

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def one_by_one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(len(x), len(weight))
    for column in range(x.shape[1]):
        total += x[:, column, None] * weight[None, :, column]
    return total


def largest_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    terms = x[:, None] * weight
    order = terms.abs().argsort(-1, descending=True)
    total = torch.zeros(len(x), len(weight))
    for term in terms.gather(-1, order).unbind(-1):
        total += term
    return total


def cutting_off(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # a product of two bfloat16 numbers and a sum of two float32 numbers are exact enough in float64
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for column in range(x.shape[1]):
        total += x[:, column, None].double() * weight[None, :, column].double()
        nearest = total.float()
        beyond = nearest.double().abs() > total.abs()
        total = torch.where(beyond, nearest.nextafter(torch.zeros(())), nearest).double()
    return total.float()


def made(of_one_sign: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator) for s in ((9, 300), (7, 300), (7,)))
    if of_one_sign:
        x, weight = x.abs(), weight.abs()
    return x.bfloat16(), weight.bfloat16(), bias.bfloat16()


@pytest.mark.parametrize("product", [one_by_one, largest_first, cutting_off])
@pytest.mark.parametrize("of_one_sign", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_holds_in_any_order_rounded_or_cut_off(
    product: Product, of_one_sign: bool, biased: bool, stored: torch.dtype
) -> None:
    x, weight, bias = made(of_one_sign)
    exact = x.double() @ weight.double().T
    y = product(x.float(), weight.float())
    if biased:
        exact += bias.double()
        # the worst that is done: rounded before the bias is added, and after
        y = y.to(stored).float() + bias.float()
    error = (y.to(stored).double() - exact).abs()
    bound = linear_bound(x, weight, bias if biased else None, dtype=stored)
    assert bound.dtype == torch.float64 and bound.shape == (9, 7)
    assert bool((error <= bound).all())
    # and is not so wide that it would hold for anything: within 30 times what cutting off loses
    if product is cutting_off and of_one_sign and not biased:
        assert float((error / bound).max()) > 1 / 30


def test_products_that_vanish_in_float32_are_allowed_for() -> None:
    x = torch.full((1, 4), 1e-25, dtype=torch.bfloat16)
    weight = torch.full((1, 4), 1e-20, dtype=torch.bfloat16)
    error = (x.double() @ weight.double().T).abs()
    assert float(error) > 0
    assert bool((error <= linear_bound(x, weight, dtype=torch.bfloat16)).all())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_output_row_scaled_by_a_twentieth_is_outside(stored: torch.dtype) -> None:
    x, weight, _ = made(of_one_sign=False)
    x, weight = x.to(stored), weight.to(stored)
    exact = x.double() @ weight.double().T
    bound = linear_bound(x, weight, dtype=stored)
    assert bool(((1.05 * exact).to(stored).double() - exact).abs().gt(bound).any(0).all())
