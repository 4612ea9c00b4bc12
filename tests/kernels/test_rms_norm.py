"""Normalisation with a residual, and with one rounding or two, against engines' own code."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels.rms_norm import rms_norm

LOW = [torch.bfloat16, torch.float16]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(5, 63), (7, 3, 20)])
def test_with_a_residual_the_sum_is_normed(shape: tuple[int, ...]) -> None:
    x, residual, weight = random(*shape), random(*shape, seed=1), random(shape[-1], seed=2)
    assert torch.equal(
        rms_norm(x, weight, 1e-5, residual=residual), rms_norm(x + residual, weight, 1e-5)
    )


@pytest.mark.parametrize("dtype", LOW)
def test_the_sum_is_not_rounded_before_it_is_normed(dtype: torch.dtype) -> None:
    x, residual = random(9, 40).to(dtype), random(9, 40, seed=1).to(dtype)
    weight = random(40, seed=2).to(dtype)
    normed = rms_norm(x.float(), weight, 1e-6, residual=residual, round_to=dtype)
    apart = rms_norm((x + residual).float(), weight, 1e-6, round_to=dtype)
    assert torch.equal(normed, rms_norm(x.float() + residual.float(), weight, 1e-6, round_to=dtype))
    assert not torch.equal(normed, apart)


@pytest.mark.parametrize("dtype", LOW)
def test_two_roundings_are_those_of_transformers(dtype: torch.dtype) -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    x, weight = random(9, 40).to(dtype), random(40, seed=1).to(dtype)
    theirs = qwen3.Qwen3RMSNorm(40, 1e-6).to(dtype)
    theirs.weight.data = weight
    ours = rms_norm(x.float(), weight, 1e-6, round_to=dtype)
    assert torch.equal(ours, theirs(x).float())


@pytest.mark.parametrize("dtype", LOW)
def test_one_rounding_is_that_of_torch(dtype: torch.dtype) -> None:
    x, weight = random(9, 40).to(dtype), random(40, seed=1).to(dtype)
    once = rms_norm(x.float(), weight, 1e-6, rounds_before_weight=False, round_to=dtype)
    assert torch.equal(once, torch.nn.functional.rms_norm(x, (40,), weight, 1e-6).float())
    assert not torch.equal(once, rms_norm(x.float(), weight, 1e-6, round_to=dtype))


def test_without_rounding_the_order_of_weight_and_rounding_is_nothing() -> None:
    x, weight = random(9, 40), random(40, seed=1)
    assert torch.equal(
        rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6, rounds_before_weight=False)
    )


def test_a_residual_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"residual must have shape \[4, 6\], got \[1, 6\]"):
        rms_norm(random(4, 6), torch.ones(6), 1e-6, residual=random(1, 6))
