"""The gate of a feed-forward network against its formula, and against how torch rounds it."""

from __future__ import annotations

import math

import pytest
import torch

from layerbisect.kernels.swiglu import swiglu


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 5)])
def test_swiglu_follows_its_formula(shape: tuple[int, ...]) -> None:
    gate, up = 4 * random(*shape), random(*shape, seed=1)
    expected = torch.tensor(
        [z / (1 + math.exp(-z)) * u for z, u in zip(gate.flatten(), up.flatten(), strict=True)],
        dtype=torch.float64,
    ).view(shape)
    torch.testing.assert_close(swiglu(gate, up), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_silu_and_the_product(dtype: torch.dtype) -> None:
    gate, up = random(9, 40).to(dtype), random(9, 40, seed=1).to(dtype)
    rough = swiglu(gate.float(), up.float(), round_to=dtype)
    # arithmetic in the narrower dtype rounds each of its operations by itself
    assert torch.equal(rough, (torch.nn.functional.silu(gate) * up).float())
    once = swiglu(gate.float(), up.float()).to(dtype).float()
    assert not torch.equal(rough, once)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"up must have shape \[2, 6\], got \[2, 5\]"):
        swiglu(random(2, 6), random(2, 5))
    with pytest.raises(TypeError, match="gate must be float32 or float64, got torch.float16"):
        swiglu(random(2, 6).half(), random(2, 6).half())
