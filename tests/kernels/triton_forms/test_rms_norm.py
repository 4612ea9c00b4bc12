"""RMSNorm in Triton: within its bound of the exact norm, and batch-invariant where it says so."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels import rms_norm as reference
from layerbisect.kernels.bounds.rms_norm import rms_norm_bound

pytest.importorskip("triton")

from layerbisect.kernels.triton_forms.rms_norm import builds, rms_norm  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
EPS = 1e-6


def random(
    *shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("twice", [False, True], ids=["one-rounding", "two-roundings"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("shape", [(1, 128), (7, 60), (3, 2, 60), (2, 1500)], ids=str)
def test_is_within_its_bound(
    shape: tuple[int, ...],
    with_residual: bool,
    twice: bool,
    dtype: torch.dtype,
    deterministic: bool,
    device: str,
) -> None:
    x, weight = (random(*shape[at:], device=device, dtype=dtype) for at in (0, len(shape) - 1))
    residual = random(*shape, device=device, dtype=dtype, seed=1) if with_residual else None
    y = rms_norm(
        x,
        weight,
        EPS,
        residual=residual,
        rounds_before_weight=twice,
        deterministic=deterministic,
    )
    exact = reference.rms_norm(x.double(), weight.double(), EPS, residual=residual)
    bound = rms_norm_bound(
        x, weight, EPS, residual=residual, rounds_before_weight=twice, dtype=dtype
    )
    assert y.dtype == dtype and y.shape == x.shape
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("rows", "deterministic"), [(63, False), (63, True), (1000, False)], ids=str
)
def test_many_rows_are_within_the_bound(rows: int, deterministic: bool, device: str) -> None:
    x, weight = (random(*shape, device=device).bfloat16() for shape in ((rows, 20), (20,)))
    y = rms_norm(x, weight, EPS, deterministic=deterministic)
    exact = reference.rms_norm(x.double(), weight.double(), EPS)
    assert ((y.double() - exact).abs() <= rms_norm_bound(x, weight, EPS, dtype=y.dtype)).all()


@FORMS
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("twice", [False, True], ids=["one-rounding", "two-roundings"])
def test_rounds_where_engines_do(
    twice: bool, dtype: torch.dtype, deterministic: bool, device: str
) -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    x, weight = (random(*shape, device=device).to(dtype) for shape in ((63, 60), (60,)))
    module = qwen3.Qwen3RMSNorm(60, EPS)
    module.weight.data = weight
    in_two, in_one = module(x), torch.nn.functional.rms_norm(x, (60,), weight, EPS)
    theirs, others = (in_two, in_one) if twice else (in_one, in_two)
    y = rms_norm(x, weight, EPS, rounds_before_weight=twice, deterministic=deterministic)
    # the order of the sum turns a rounding here and there
    assert (y == theirs).double().mean() > 0.998
    assert (y == others).double().mean() < 0.9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(63, 60), (63, 128), (9, 4, 60)], ids=str)
def test_deterministic_rows_have_the_same_bits_in_any_batch(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    x, weight = (random(*shape[at:], device=device, dtype=dtype) for at in (0, len(shape) - 1))
    residual = random(*shape, device=device, dtype=dtype, seed=1)

    def norm(rows: torch.Tensor | slice) -> torch.Tensor:
        return rms_norm(x[rows], weight, EPS, residual=residual[rows], deterministic=True)

    whole = norm(slice(None))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2)).to(device)
    assert torch.equal(norm(order), whole[order])
    for rows in (slice(0, 1), slice(3, 4), slice(1, 8)):
        assert torch.equal(norm(rows), whole[rows])


def test_deterministic_bits_do_not_depend_on_the_address(device: str) -> None:
    memory, weight = random(3 * 128 + 1, device=device).bfloat16(), random(128, device=device)
    x = memory[1:].view(3, 128)
    assert x.data_ptr() % 16
    normed = rms_norm(x, weight, EPS, deterministic=True)
    assert torch.equal(normed, rms_norm(x.clone(), weight, EPS, deterministic=True))


@pytest.mark.parametrize("hidden", [60, 128])
def test_the_fast_form_is_not_batch_invariant(hidden: int, device: str) -> None:
    x, weight = random(200, hidden, device=device), random(hidden, device=device)

    def norm(rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, weight, EPS, deterministic=False)

    alone = torch.cat([norm(rows) for rows in x[:63].split(9)])
    for batch in (x[:63], x):
        beside_others = norm(batch)[:63]
        assert not torch.equal(alone, beside_others)
        torch.testing.assert_close(alone, beside_others, rtol=1e-6, atol=0)


@FORMS
def test_takes_views_and_no_rows(deterministic: bool, device: str) -> None:
    x, weight = random(5, 3, 40, device=device), random(20, device=device, seed=1)
    view = x[..., :20]
    assert torch.equal(
        rms_norm(view, weight, EPS, deterministic=deterministic),
        rms_norm(view.clone(), weight, EPS, deterministic=deterministic),
    )
    assert rms_norm(view[:0], weight, EPS, deterministic=deterministic).shape == (0, 3, 20)


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    x = random(4, 6, device=device)
    with pytest.raises(ValueError, match=r"weight must have shape \[6\], got \[5\]"):
        rms_norm(x, x[0, :5], EPS, deterministic=True)
    with pytest.raises(ValueError, match=r"residual must have shape \[4, 6\], got \[3, 6\]"):
        rms_norm(x, x[0], EPS, residual=x[:3], deterministic=True)


def test_builds_name_every_argument() -> None:
    for build in builds():
        assert {*build.signature, *build.constexprs} == set(build.fn.arg_names), build.name
