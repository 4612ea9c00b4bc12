"""SwiGLU in Triton: within its bound of the exact product, and the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels import swiglu as reference
from layerbisect.kernels.bounds.swiglu import swiglu_bound

pytest.importorskip("triton")

from layerbisect.kernels.triton_forms.swiglu import builds, swiglu  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])


def random(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 60), (63, 128), (1000, 20)], ids=str)
def test_is_within_its_bound(
    shape: tuple[int, ...], dtype: torch.dtype, deterministic: bool, device: str
) -> None:
    gate, up = (random(*shape, device=device, seed=seed).to(dtype) for seed in (0, 1))
    y = swiglu(8 * gate, up, deterministic=deterministic)
    exact = reference.swiglu(8 * gate.double(), up.double())
    assert y.dtype == dtype and y.shape == gate.shape
    assert ((y.double() - exact).abs() <= swiglu_bound(8 * gate, up, dtype=dtype)).all()


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_any_size(dtype: torch.dtype, deterministic: bool, device: str) -> None:
    gate = torch.tensor([[-6e4, -300, -95, -88.5, -30, -1e-7, 0, 1e-7, 30, 300, 6e4]])
    gate = gate.to(device=device, dtype=dtype)
    y = swiglu(gate, torch.ones_like(gate), deterministic=deterministic)
    exact = reference.swiglu(gate.double(), torch.ones_like(gate).double())
    bound = swiglu_bound(gate, torch.ones_like(gate), dtype=dtype)
    assert ((y.double() - exact).abs() <= bound).all()


@FORMS
def test_rounds_once(deterministic: bool, device: str) -> None:
    gate, up = (random(63, 60, device=device, seed=seed).bfloat16() for seed in (0, 1))
    y = swiglu(gate, up, deterministic=deterministic)
    once = reference.swiglu(gate.float(), up.float()).bfloat16()
    assert (y == once).double().mean() > 0.998
    assert (y == torch.nn.functional.silu(gate) * up).double().mean() < 0.9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_the_same_bits_in_any_batch_and_form(dtype: torch.dtype, device: str) -> None:
    gate, up = (random(63, 60, device=device, seed=seed).to(dtype) for seed in (0, 1))
    whole = swiglu(gate, up, deterministic=True)
    assert torch.equal(swiglu(gate, up, deterministic=False), whole)
    order = torch.randperm(63, generator=torch.Generator().manual_seed(2)).to(device)
    assert torch.equal(swiglu(gate[order], up[order], deterministic=True), whole[order])
    for rows in (slice(0, 1), slice(3, 4), slice(1, 8)):
        for deterministic in (False, True):
            few = swiglu(gate[rows], up[rows], deterministic=deterministic)
            assert torch.equal(few, whole[rows])


@FORMS
def test_takes_views_and_no_rows(deterministic: bool, device: str) -> None:
    gate, up = random(5, 40, device=device).chunk(2, dim=-1)
    assert torch.equal(
        swiglu(gate, up, deterministic=deterministic),
        swiglu(gate.clone(), up.clone(), deterministic=deterministic),
    )
    assert swiglu(gate[:0], up[:0], deterministic=deterministic).shape == (0, 20)


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    x = random(4, 6, device=device)
    with pytest.raises(ValueError, match=r"up must have shape \[4, 6\], got \[1, 6\]"):
        swiglu(x, x[:1], deterministic=True)


def test_builds_name_every_argument() -> None:
    for build in builds():
        assert {*build.signature, *build.constexprs} == set(build.fn.arg_names), build.name
