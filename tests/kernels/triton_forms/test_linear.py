"""The Triton forms of a linear projection: right, and batch-invariant where they say so."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels.bounds.linear import linear_bound
from layerbisect.kernels.replay.implementation import Unsupported

pytest.importorskip("triton")

from layerbisect.kernels.triton_forms.linear import (  # noqa: E402
    _fast_splits,
    _fast_tile,
    linear,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# rows, in, out: none a multiple of its tile, or one
SHAPES = [(1, 60, 33), (63, 128, 60), (63, 60, 128)]

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def made(rows: int, ins: int, outs: int, dtype: torch.dtype, device: str, seed: int = 0) -> Given:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, ins), (outs, ins), (outs,))
    x, weight, bias = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    return x, weight, bias


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("splits", [None, 1, 8])
def test_is_exact_within_the_bound(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    deterministic: bool,
    splits: int | None,
    device: str,
) -> None:
    x, weight, offset = made(*shape, dtype, device)
    bias = None if splits == 1 else offset
    y = linear(x, weight, bias, deterministic=deterministic, splits=splits)
    assert y.dtype == dtype and y.shape == (shape[0], shape[2])
    bound = linear_bound(x, weight, bias, dtype=dtype)
    assert bool(((y.double() - exact(x, weight, bias)).abs() <= bound).all())


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_thousand_rows(deterministic: bool, device: str) -> None:
    x, weight, bias = made(1000, 60, 16, torch.bfloat16, device)
    y = linear(x, weight, bias, deterministic=deterministic)
    bound = linear_bound(x, weight, bias, dtype=x.dtype)
    assert bool(((y.double() - exact(x, weight, bias)).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ins", [60, 128])
@pytest.mark.parametrize("splits", [None, 8])
def test_deterministic_gives_a_row_the_same_bits_in_any_batch(
    dtype: torch.dtype, ins: int, splits: int | None, device: str
) -> None:
    x, weight, bias = made(1000, ins, 33, dtype, device)

    def project(rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, weight, bias, deterministic=True, splits=splits)

    whole = project(x)
    assert torch.equal(project(x), whole)
    for start, end in ((0, 1), (17, 18), (999, 1000), (3, 66), (1, 17)):
        assert torch.equal(project(x[start:end]), whole[start:end])
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:63].to(device)
    assert torch.equal(project(x[order]), whole[order])
    others = torch.cat([1e3 * x[:1].repeat(65, 1), x[5:6]])
    assert torch.equal(project(others)[-1], whole[5])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ins", [60, 128])
def test_fast_gives_a_row_other_bits_in_another_batch(
    dtype: torch.dtype, ins: int, device: str
) -> None:
    half, weight, _ = made(1000, ins // 2, 33, dtype, device)
    # sums that cancel: what is left of them is how they were ordered, in any dtype
    order = torch.randperm(ins // 2, generator=torch.Generator().manual_seed(1)).to(device)
    x, weight = torch.cat([half, half[:, order]], 1), torch.cat([weight, -weight[:, order]], 1)
    alone = torch.cat([linear(x[i : i + 1], weight, deterministic=False) for i in range(4)])
    assert not torch.equal(linear(x[:63], weight, deterministic=False)[:4], alone)
    assert not torch.equal(linear(x, weight, deterministic=False)[:4], alone)


@pytest.mark.parametrize(
    ("rows", "ins", "outs", "splits"),
    [
        (1, 4096, 4096, 2),
        (1, 4096, 1024, 8),
        (1, 60, 1024, 4),
        (64, 4096, 1024, 8),
        (64, 60, 1024, 1),
        (1000, 4096, 4096, 1),
    ],
)
def test_fast_cuts_the_sum_where_there_are_too_few_tiles(
    rows: int, ins: int, outs: int, splits: int
) -> None:
    tile = _fast_tile(rows)
    assert _fast_splits(-(-rows // tile.rows) * -(-outs // tile.outs), ins, tile) == splits


def test_what_a_row_holds_stays_in_it(device: str) -> None:
    x, weight, bias = made(20, 60, 33, torch.bfloat16, device)
    x[3] = torch.nan
    for deterministic in (False, True):
        y = linear(x, weight, bias, deterministic=deterministic)
        assert y.isnan().all(1).nonzero().flatten().tolist() == [3]
        assert not y[[2, 4]].isnan().any()


def test_columns_of_a_larger_tensor_and_no_rows(device: str) -> None:
    x, weight, bias = made(5, 60, 33, torch.float32, device)
    wide = torch.cat([x, x], 1)
    expected = linear(x, weight, bias, deterministic=True)
    assert torch.equal(linear(wide[:, 60:], weight, bias, deterministic=True), expected)
    assert linear(x[:0], weight, bias, deterministic=False).shape == (0, 33)


def test_refuses_what_does_not_fit() -> None:
    x, weight, bias = made(2, 4, 3, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[3, 4\]"):
        linear(x[:, :3], weight, deterministic=True)
    with pytest.raises(ValueError, match="bfloat16 and torch.float32"):
        linear(x.bfloat16(), weight, deterministic=True)
    with pytest.raises(ValueError, match=r"\[3\], got \[2\]"):
        linear(x, weight, bias[:2], deterministic=True)
    with pytest.raises(ValueError, match="splits must be at least 1, got 0"):
        linear(x, weight, deterministic=True, splits=0)
    with pytest.raises(Unsupported, match="x must be .* got torch.float64"):
        linear(x.double(), weight.double(), deterministic=True)
