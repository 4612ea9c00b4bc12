"""What engines compute lies within the bounds of norm, gate and rotary embedding; faults do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerbisect.kernels.bounds.common import unit_roundoff
from layerbisect.kernels.bounds.rms_norm import rms_norm_bound
from layerbisect.kernels.bounds.rope import rope_bound
from layerbisect.kernels.bounds.swiglu import swiglu_bound
from layerbisect.kernels.rms_norm import rms_norm
from layerbisect.kernels.rope import rope
from layerbisect.kernels.swiglu import swiglu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
STYLES = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
EPS = 1e-6


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def frequencies(channels: int) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, channels, 2, dtype=torch.float32) / channels)


def share(y: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the largest error as a share of the bound."""
    assert bound.dtype == torch.float64 and bound.shape == exact.shape and (bound > 0).all()
    return float(((y.double() - exact).abs() / bound).max())


@DTYPES
@pytest.mark.parametrize("twice", [False, True], ids=["one-rounding", "two-roundings"])
@pytest.mark.parametrize("hidden", [60, 4096])
def test_norms_of_engines(hidden: int, twice: bool, dtype: torch.dtype) -> None:
    x, weight = random(40, hidden).to(dtype), random(hidden, seed=1).to(dtype)
    exact = rms_norm(x.double(), weight.double(), EPS)
    bound = rms_norm_bound(x, weight, EPS, rounds_before_weight=twice, dtype=dtype)
    steps: dict[str, Any] = {"rounds_before_weight": twice, "round_to": dtype}
    one_by_one = (x.float() ** 2).cumsum(-1)[:, -1:] / hidden
    scaled = (x.float() * torch.rsqrt(one_by_one + EPS)).to(dtype if twice else torch.float32)
    outputs = [rms_norm(x.float(), weight, EPS, **steps), (scaled * weight.to(scaled.dtype))]
    if not twice:
        outputs.append(torch.nn.functional.rms_norm(x, (hidden,), weight, EPS))
    for y in outputs:
        assert share(y.to(dtype), exact, bound) < 1
    # about one unit roundoff a rounding, and what the sum may lose
    widest = float((bound / exact.abs()).median())
    roundings = 2 if twice else 1
    assert widest < 1.01 * (roundings * unit_roundoff(dtype) + (hidden / 2 + 15) * 2**-24)


@DTYPES
def test_norms_of_a_sum_rounded_before_after_or_in_part(dtype: torch.dtype) -> None:
    x, residual = random(40, 60).to(dtype), random(40, 60, seed=1).to(dtype)
    weight = random(60, seed=2).to(dtype)
    exact = rms_norm(x.double(), weight.double(), EPS, residual=residual)
    bound = rms_norm_bound(x, weight, EPS, residual=residual, dtype=dtype)
    total = x.float() + residual.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
    for y in (
        rms_norm(x.float(), weight, EPS, residual=residual, round_to=dtype),
        rms_norm((x + residual).float(), weight, EPS, round_to=dtype),
        total.to(dtype).float() * scale * weight,
    ):
        assert share(y.to(dtype), exact, bound) < 1


def test_a_norm_at_fault_is_beyond_its_bound() -> None:
    x, weight = random(40, 60).bfloat16(), random(60, seed=1).bfloat16()
    exact = rms_norm(x.double(), weight.double(), EPS)
    bound = rms_norm_bound(x, weight, EPS, dtype=torch.bfloat16)
    for faulty in (
        rms_norm(x.float(), 1 + weight.float(), EPS),
        rms_norm(x.float(), weight.float(), 0.1),
        x.float() * torch.rsqrt(x.float().var(-1, keepdim=True) + 0.05) * weight,
    ):
        assert ((faulty - exact).abs() > bound).double().mean() > 0.5


@DTYPES
def test_gates_of_engines(dtype: torch.dtype) -> None:
    gate, up = (8 * random(40, 60)).to(dtype), random(40, 60, seed=1).to(dtype)
    gate[0, :4] = torch.tensor([-300.0, -95, -88.5, 300])
    exact, bound = swiglu(gate.double(), up.double()), swiglu_bound(gate, up, dtype=dtype)
    plain = gate.float() / (1 + torch.exp2(-1.442695 * gate.float()))
    for y in (
        torch.nn.functional.silu(gate) * up,
        swiglu(gate.float(), up.float()),
        plain * up,
        plain.to(dtype) * up,
    ):
        assert share(y.to(dtype), exact, bound) < 1
    # silu's rounding, the product's, and what a steep exponential may lose
    normal = exact.abs() > 1e-3
    widest = float((bound / exact.abs())[normal].median())
    assert widest < 2.5 * unit_roundoff(dtype) + 40 * 2**-24


def test_a_gate_at_fault_is_beyond_its_bound() -> None:
    gate, up = random(40, 60).bfloat16(), random(40, 60, seed=1).bfloat16()
    exact = swiglu(gate.double(), up.double())
    bound = swiglu_bound(gate, up, dtype=torch.bfloat16)
    for faulty in (
        torch.nn.functional.gelu(gate.double()) * up,
        swiglu(up.double(), gate.double()),
        torch.sigmoid(1.702 * gate.double()) * gate * up,
    ):
        assert ((faulty - exact).abs() > bound).double().mean() > 0.9


@DTYPES
@STYLES
@pytest.mark.parametrize("far", [1, 999_000])
def test_rotary_embeddings_of_engines(far: int, interleaved: bool, dtype: torch.dtype) -> None:
    x, position, inv_freq = random(40, 3, 60).to(dtype), far + torch.arange(40), frequencies(60)
    style: dict[str, Any] = {"attention_scaling": 1.3, "interleaved": interleaved}
    exact = rope(x.double(), position, inv_freq, **style)
    bound = rope_bound(x, position, inv_freq, **style, dtype=dtype)
    for y in (
        rope(x.float(), position, inv_freq, **style),
        rope(x.float(), position, inv_freq, **style, round_to=dtype),
    ):
        assert share(y.to(dtype), exact, bound) < 1
    if far == 1:
        # each of two terms: cosine or sine, product and sum are rounded, and so is an angle of 40
        largest = 1.3 * x.double().abs().amax(-1, keepdim=True)
        each = 3 * unit_roundoff(dtype) + (2 * 40 + 10) * 2**-24
        assert (bound <= 2 * each * largest).all()


@STYLES
def test_a_rotary_embedding_at_fault_is_beyond_its_bound(interleaved: bool) -> None:
    x, position, inv_freq = random(40, 3, 60).bfloat16(), torch.arange(40), frequencies(60)
    style: dict[str, Any] = {"interleaved": interleaved}
    exact = rope(x.double(), position, inv_freq, **style)
    bound = rope_bound(x, position, inv_freq, **style, dtype=torch.bfloat16)
    fastest = [0, 1, 30, 31] if not interleaved else [0, 1, 2, 3]
    shifted = rope(x.double(), position + 1, inv_freq, **style)
    assert ((shifted - exact).abs() > bound)[..., fastest].double().mean() > 0.9
    other = rope(x.double(), position, inv_freq, interleaved=not interleaved)
    assert ((other - exact).abs() > bound)[20:].double().mean() > 0.5
