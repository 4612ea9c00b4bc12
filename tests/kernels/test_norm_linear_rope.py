"""Normalisation, projection and rotary embedding against their formulas."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from layerbisect.kernels.linear import linear
from layerbisect.kernels.rms_norm import rms_norm
from layerbisect.kernels.rope import ROPE_TYPES, rope, rope_attention_scaling, rope_frequencies


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Rope:
    head_dim: int = 64
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None


@pytest.mark.parametrize("shape", [(5, 63), (7, 3, 20), (1, 1)])
def test_rms_norm_follows_its_formula(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1)
    expected = torch.empty_like(x)
    for at in itertools.product(*map(range, shape[:-1])):
        mean = sum(float(value) ** 2 for value in x[at]) / shape[-1]
        expected[at] = x[at] / (mean + 1e-5) ** 0.5 * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, rtol=1e-13, atol=0)


def test_rms_norm_of_a_zero_row_is_zero() -> None:
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


def test_rms_norm_rounds_before_and_after_the_weight() -> None:
    x, weight = random(9, 40).float(), random(40, seed=1).bfloat16()
    normalised = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    rough = rms_norm(x, weight, 1e-6, round_to=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert torch.equal(rough, (normalised * weight).float())


def test_linear_follows_its_formula() -> None:
    x, weight, bias = random(5, 7), random(3, 7, seed=1), random(3, seed=2)
    expected = torch.stack([(x * row).sum(-1) for row in weight], dim=1)
    torch.testing.assert_close(linear(x, weight), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(linear(x, weight, bias), expected + bias, rtol=1e-12, atol=1e-14)


def test_linear_rounds_once_after_the_bias() -> None:
    x, weight, bias = random(5, 70).float(), random(3, 70, seed=1), random(3, seed=2).float()
    exact = linear(x, weight, bias)
    assert torch.equal(linear(x, weight, bias, round_to=torch.bfloat16), exact.bfloat16().float())


@pytest.mark.parametrize("channels", [2, 64])
def test_rope_multiplies_by_a_complex_phase(channels: int) -> None:
    x, position = random(11, 3, channels), torch.arange(100, 111)
    inv_freq = rope_frequencies(Rope(head_dim=channels))
    first, second = x.chunk(2, dim=-1)
    phase = torch.polar(torch.ones(1).double(), position[:, None] * inv_freq.double())[:, None]
    expected = torch.complex(first, second) * phase
    turned = rope(x, position, inv_freq)
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], dim=-1))


def test_rope_depends_on_relative_position_only() -> None:
    inv_freq = rope_frequencies(Rope())
    q, k = random(1, 1, 64), random(1, 1, 64, seed=1)

    def product(at_q: int, at_k: int) -> torch.Tensor:
        turned = rope(q, torch.tensor([at_q]), inv_freq)
        return (turned * rope(k, torch.tensor([at_k]), inv_freq)).sum()

    torch.testing.assert_close(product(9, 4), product(1009, 1004))
    assert not torch.isclose(product(9, 4), product(9, 5))


@pytest.mark.parametrize("scaling", [1.0, 1.7])
def test_inverse_rope_undoes_it(scaling: float) -> None:
    x, position, inv_freq = random(6, 2, 64), torch.arange(6) * 50, rope_frequencies(Rope())
    turned = rope(x, position, inv_freq, attention_scaling=scaling)
    back = rope(turned, position, inv_freq, attention_scaling=scaling, inverse=True)
    torch.testing.assert_close(back, x)


def test_rope_rounds_cosine_sine_products_and_sum() -> None:
    x, position, inv_freq = random(6, 2, 16).bfloat16(), torch.arange(6), rope_frequencies(Rope(16))
    angle = position.float()[:, None] * inv_freq
    cos, sin = (part.bfloat16()[:, None] for part in (angle.cos(), angle.sin()))
    first, second = x.chunk(2, dim=-1)
    # bfloat16 arithmetic rounds every product and sum by itself
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    rough = rope(x.float(), position, inv_freq, round_to=torch.bfloat16)
    assert torch.equal(rough, expected.float())


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "yarn-given": {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.3,
        "beta_fast": 16,
        "beta_slow": 2,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = name.partition("-")[0]
    parameters = {"rope_type": kind, "rope_theta": 500000.0, **SCALINGS[name]}
    theirs = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=128,
            num_attention_heads=2,
            max_position_embeddings=2048,
            rope_parameters=dict(parameters),
        )
    )
    config = Rope(64, 500000.0, None if kind == "default" else parameters)
    torch.testing.assert_close(rope_frequencies(config), theirs.inv_freq, rtol=2e-7, atol=0)
    assert rope_attention_scaling(config) == pytest.approx(theirs.attention_scaling, rel=1e-12)
    assert kind in ROPE_TYPES


def test_wrong_arguments_are_named() -> None:
    x = random(4, 6)
    with pytest.raises(ValueError, match=r"weight must have shape \[6\], got \[5\]"):
        rms_norm(x, torch.ones(5), 1e-6)
    with pytest.raises(TypeError, match="x must be float32 or float64, got torch.bfloat16"):
        rms_norm(x.bfloat16(), torch.ones(6), 1e-6)
    with pytest.raises(ValueError, match=r"weight must have shape \[out, 6\], got \[6, 4\]"):
        linear(x, torch.ones(6, 4))
    with pytest.raises(ValueError, match=r"bias must have shape \[2\], got \[3\]"):
        linear(x, torch.ones(2, 6), torch.ones(3))
    with pytest.raises(ValueError, match=r"x must have shape \[row, head, 32\], got \[4, 6\]"):
        rope(x, torch.arange(4), torch.ones(16))
    with pytest.raises(ValueError, match=r"position must have shape \[4\], got \[3\]"):
        rope(random(4, 1, 32), torch.arange(3), torch.ones(16))
    with pytest.raises(ValueError, match="rope_type must be one of .*, got 'dynamic'"):
        rope_frequencies(Rope(rope_scaling={"rope_type": "dynamic"}))
