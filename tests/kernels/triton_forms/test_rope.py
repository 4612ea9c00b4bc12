"""Rotary embedding in Triton: within its bound of the exact one, and the same bits in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerbisect.kernels import rope as reference
from layerbisect.kernels.bounds.rope import rope_bound

pytest.importorskip("triton")

from layerbisect.kernels.triton_forms.rope import builds, rope  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
STYLES = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])


def random(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device)


def frequencies(channels: int, device: str) -> torch.Tensor:
    exponent = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    return (10000.0**-exponent).to(device)


@FORMS
@STYLES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 60), (63, 5, 128), (7, 20, 16)], ids=str)
def test_is_within_its_bound(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    interleaved: bool,
    deterministic: bool,
    device: str,
) -> None:
    x, inv_freq = random(*shape, device=device).to(dtype), frequencies(shape[-1], device)
    position = torch.arange(len(x), device=device) * 15_000 + 3
    style: dict[str, Any] = {"attention_scaling": 1.3, "interleaved": interleaved}
    y = rope(x, position, inv_freq, **style, deterministic=deterministic)
    exact = reference.rope(x.double(), position, inv_freq, **style)
    assert y.dtype == dtype and y.shape == x.shape
    bound = rope_bound(x, position, inv_freq, **style, dtype=dtype)
    assert ((y.double() - exact).abs() <= bound).all()


@FORMS
def test_many_rows_are_within_the_bound(deterministic: bool, device: str) -> None:
    x, inv_freq = random(1000, 1, 8, device=device).bfloat16(), frequencies(8, device)
    position = torch.arange(1000, device=device)
    y = rope(x, position, inv_freq, deterministic=deterministic)
    exact = reference.rope(x.double(), position, inv_freq)
    assert ((y.double() - exact).abs() <= rope_bound(x, position, inv_freq, dtype=y.dtype)).all()


@FORMS
def test_far_out_the_angle_is_what_engines_compute_and_nothing_else_is_lost(
    deterministic: bool, device: str
) -> None:
    inv_freq = frequencies(60, device)
    position = torch.tensor([131_071, 999_983, 1_000_000], device=device)
    x = random(3, 2, 60, device=device)
    y = rope(x, position, inv_freq, deterministic=deterministic)
    # the angle in float32, and all else in float64
    angle = (position[:, None].float() * inv_freq).double()[:, None]
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-6)


@FORMS
def test_is_within_the_roundings_of_transformers(deterministic: bool, device: str) -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    x, inv_freq = random(9, 3, 60, device=device), frequencies(60, device)
    position = torch.arange(9, device=device) * 100_000
    angle = torch.cat([position[:, None].float() * inv_freq] * 2, dim=-1)
    theirs, _ = qwen3.apply_rotary_pos_emb(x, x, angle.cos(), angle.sin())
    y = rope(x, position, inv_freq, deterministic=deterministic)
    torch.testing.assert_close(y, theirs, rtol=0, atol=2e-6)


@FORMS
def test_interleaved_is_the_half_style_of_permuted_channels(
    deterministic: bool, device: str
) -> None:
    x, inv_freq = random(7, 3, 60, device=device), frequencies(60, device)
    position = torch.arange(7, device=device) * 11
    order = torch.cat([torch.arange(0, 60, 2), torch.arange(1, 60, 2)]).to(device)
    turned = rope(x, position, inv_freq, interleaved=True, deterministic=deterministic)
    half = rope(x[..., order], position, inv_freq, deterministic=deterministic)
    assert torch.equal(turned[..., order], half)


@STYLES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_the_same_bits_in_any_batch_and_form(
    dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    x, inv_freq = random(63, 3, 60, device=device).to(dtype), frequencies(60, device)
    position = torch.arange(63, device=device) * 997

    def turn(rows: torch.Tensor | slice, deterministic: bool) -> torch.Tensor:
        return rope(
            x[rows],
            position[rows],
            inv_freq,
            interleaved=interleaved,
            deterministic=deterministic,
        )

    whole = turn(slice(None), True)
    assert torch.equal(turn(slice(None), False), whole)
    order = torch.randperm(63, generator=torch.Generator().manual_seed(2)).to(device)
    assert torch.equal(turn(order, True), whole[order])
    for rows in (slice(0, 1), slice(3, 4), slice(1, 8)):
        for deterministic in (False, True):
            assert torch.equal(turn(rows, deterministic), whole[rows])


@FORMS
def test_takes_views_and_no_rows(deterministic: bool, device: str) -> None:
    x, inv_freq = random(5, 2, 40, device=device)[..., :20], frequencies(20, device)
    position = torch.arange(10, device=device)[::2]
    assert torch.equal(
        rope(x, position, inv_freq, deterministic=deterministic),
        rope(x.clone(), position.clone(), inv_freq, deterministic=deterministic),
    )
    empty = rope(x[:0], position[:0], inv_freq, deterministic=deterministic)
    assert empty.shape == (0, 2, 20)


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    x, inv_freq = random(4, 2, 6, device=device), frequencies(8, device)
    position = torch.arange(4, device=device)
    with pytest.raises(ValueError, match=r"x must have shape \[row, head, 8\], got \[4, 2, 6\]"):
        rope(x, position, inv_freq, deterministic=True)
    with pytest.raises(ValueError, match=r"position must have shape \[4\], got \[3\]"):
        rope(x, position[:3], inv_freq[:3], deterministic=True)


def test_builds_name_every_argument() -> None:
    for build in builds():
        assert {*build.signature, *build.constexprs} == set(build.fn.arg_names), build.name
