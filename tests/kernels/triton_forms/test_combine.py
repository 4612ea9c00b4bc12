"""The Triton forms of the sum over slots: right, in the order that they say."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels.bounds.experts import combine_bound
from layerbisect.kernels.experts import combine as reference

pytest.importorskip("triton")

from layerbisect.kernels.triton_forms.combine import combine  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def made(rows: int, slots: int, hidden: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(rows, slots, hidden, generator=generator).to(dtype)
    ids = torch.rand(rows, slots, generator=generator).argsort(1)
    ids[0, -1] = -1
    outputs[0, -1] = torch.nan
    return [outputs.to(device), ids.to(device)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 60), (63, 2, 128), (2, 1, 300)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("by_expert", [False, True])
def test_is_exact_within_the_bound(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    deterministic: bool,
    by_expert: bool,
    device: str,
) -> None:
    outputs, ids = made(*shape, dtype, device)
    y = combine(outputs, ids, deterministic=deterministic, by_expert=by_expert)
    assert y.dtype == dtype and y.shape == outputs[:, 0].shape
    error = (y.double() - reference(outputs.double(), ids)).abs()
    assert bool((error <= combine_bound(outputs, ids, dtype=dtype)).all())


def test_the_order_is_that_of_slots_or_of_the_experts_numbers(device: str) -> None:
    # what is added to 1e8 is lost, and what 1e8 was taken from again is not
    outputs = torch.tensor([[1e8, 3.0, -1e8, torch.nan, 1.0]], device=device)[..., None]
    ids = torch.tensor([[1, 0, 2, -1, 3]], device=device)
    assert combine(outputs, ids, deterministic=True).item() == 1
    by_hand = torch.tensor(3.0) + 1e8 - 1e8 + 1
    assert combine(outputs, ids, deterministic=True, by_expert=True).item() == by_hand
    first_last = torch.tensor([[2, 1, 3, -1, 0]], device=device)
    assert combine(outputs, first_last, deterministic=True, by_expert=True).item() == 0 + 1 - 1
    # every other slot: 1e8 - 1e8 + 1, and 3
    assert combine(outputs, ids, deterministic=False).item() == 4


def test_rows_of_which_no_slot_is_used_are_0(device: str) -> None:
    outputs = torch.full((2, 2, 5), torch.nan, device=device)
    ids = torch.full((2, 2), -1, device=device)
    assert combine(outputs, ids, deterministic=True).tolist() == [[0.0] * 5] * 2
    assert combine(outputs[:0], ids[:0], deterministic=True).shape == (0, 5)


def test_the_batch_changes_the_fast_forms_bits_alone(device: str) -> None:
    outputs, ids = made(140, 4, 20, torch.float32, device)
    for deterministic in (False, True):
        whole = combine(outputs, ids, deterministic=deterministic)
        some = combine(outputs[7:9], ids[7:9], deterministic=deterministic)
        assert torch.equal(some, whole[7:9]) == deterministic


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"got \[2, 3, 5\] and \[2, 4\]"):
        combine(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64), deterministic=True)
