"""Experts computed in low precision, in any order, are within the bound of their sum."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels.bounds.experts import combine_bound, experts_bound
from layerbisect.kernels.experts import Order, combine, experts
from layerbisect.kernels.router import route

EXPERTS, HIDDEN, INNER, TOP_K = 5, 60, 28, 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routed(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x = random(40, HIDDEN).to(dtype)
    weights, ids = route(random(40, EXPERTS, seed=1), TOP_K, renormalise=True)
    ids[3, 1:] = -1
    gate_up = (random(EXPERTS, 2 * INNER, HIDDEN, seed=2) / 8).to(dtype)
    return x, ids, weights, gate_up, (random(EXPERTS, HIDDEN, INNER, seed=3) / 5).to(dtype)


@pytest.mark.parametrize("order", ["expert", "slot", "once"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_in_low_precision_are_within_the_bound(dtype: torch.dtype, order: Order) -> None:
    x, *rest = routed(dtype)
    exact = experts(x.double(), *rest)
    rough = experts(x.float(), *rest, order=order, round_to=dtype)
    error, bound = (rough.double() - exact).abs(), experts_bound(x, *rest, dtype=dtype)
    assert (error <= bound).all()
    # all of 60 roundings at their worst and of one sign are some way from what happens
    assert error.mean() > bound.mean() * (1e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_rounding_is_beyond_the_bound(dtype: torch.dtype) -> None:
    x, ids, weights, gate_up, down = routed(dtype)
    exact = experts(x.double(), ids, weights, gate_up, down)
    bound = experts_bound(x, ids, weights, gate_up, down, dtype=dtype)
    swapped = experts(x.double(), ids, weights, gate_up.roll(INNER, 1), down)
    assert ((swapped - exact).abs() > bound).double().mean() > 0.5
    silent = experts(x.double(), ids, torch.where(ids == 2, 0, weights), gate_up, down)
    hit = (ids == 2).any(1)
    assert ((silent - exact).abs() > bound)[hit].any(1).double().mean() > 0.9
    assert not ((silent - exact).abs() > bound)[~hit].any()


@pytest.mark.parametrize("order", ["expert", "slot", "once"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_in_low_precision_are_within_the_bound(dtype: torch.dtype, order: Order) -> None:
    outputs = random(40, TOP_K, HIDDEN).to(dtype)
    ids = random(40, TOP_K, seed=1).argsort(1)
    ids[3, 1] = -1
    outputs[3, 1] = torch.nan
    exact = combine(outputs.double(), ids)
    rough = combine(outputs.float(), ids, order=order, round_to=dtype)
    error, bound = (rough.double() - exact).abs(), combine_bound(outputs, ids, dtype=dtype)
    assert (error <= bound).all() and bound.isfinite().all()
    assert (exact.abs() * 16 * torch.finfo(dtype).eps > bound)[exact.abs() > 1].all()


def test_no_rows() -> None:
    x, ids, weights, gate_up, down = routed(torch.float32)
    bound = experts_bound(x[:0], ids[:0], weights[:0], gate_up, down, dtype=torch.float32)
    assert bound.shape == (0, HIDDEN)
