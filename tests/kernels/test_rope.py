"""The interleaved style of rotary embedding, and both styles against engines' own code."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels.rope import rope

LOW = [torch.bfloat16, torch.float16]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def frequencies(channels: int) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, channels, 2, dtype=torch.float32) / channels)


@pytest.mark.parametrize("channels", [2, 60])
@pytest.mark.parametrize("round_to", [None, torch.bfloat16])
def test_interleaved_is_the_half_style_of_permuted_channels(
    channels: int, round_to: torch.dtype | None
) -> None:
    x, position, inv_freq = random(7, 3, channels), torch.arange(7) * 11, frequencies(channels)
    order = torch.cat([torch.arange(0, channels, 2), torch.arange(1, channels, 2)])
    turned = rope(x, position, inv_freq, interleaved=True, round_to=round_to)
    half = rope(x[..., order], position, inv_freq, round_to=round_to)
    assert torch.equal(turned[..., order], half)


def test_interleaved_is_undone_by_its_inverse() -> None:
    x, position, inv_freq = random(6, 2, 60), torch.arange(6) * 50, frequencies(60)
    turned = rope(x, position, inv_freq, interleaved=True)
    back = rope(turned, position, inv_freq, interleaved=True, inverse=True)
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("dtype", LOW)
def test_the_half_style_is_that_of_transformers(dtype: torch.dtype) -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    x, position, inv_freq = random(6, 2, 60).to(dtype), torch.arange(6), frequencies(60)
    angle = torch.cat([position[:, None].float() * inv_freq] * 2, dim=-1)
    theirs, _ = qwen3.apply_rotary_pos_emb(x, x, angle.cos().to(dtype), angle.sin().to(dtype))
    ours = rope(x.float(), position, inv_freq, round_to=dtype)
    assert torch.equal(ours, theirs.float())


@pytest.mark.parametrize("dtype", LOW)
def test_the_interleaved_style_is_that_of_gptj(dtype: torch.dtype) -> None:
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    x, position, inv_freq = random(6, 2, 60).to(dtype), torch.arange(6), frequencies(60)
    angle = position[:, None].float() * inv_freq
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    theirs = gptj.apply_rotary_pos_emb(x[None], sin[None], cos[None])[0]
    ours = rope(x.float(), position, inv_freq, interleaved=True, round_to=dtype)
    assert torch.equal(ours, theirs.float())
