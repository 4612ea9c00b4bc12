"""The Triton forms of routed experts: right, and batch-invariant where they say so."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels.bounds.experts import experts_bound
from layerbisect.kernels.experts import experts as reference
from layerbisect.kernels.router import route

pytest.importorskip("triton")

from layerbisect.kernels.triton_forms.experts import experts  # noqa: E402
from layerbisect.kernels.triton_forms.permute import permute  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def made(
    rows: int, hidden: int, inner: int, count: int, top_k: int, dtype: torch.dtype, device: str
) -> Given:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights, ids = route(random(rows, count), top_k, renormalise=True)
    x = random(rows, hidden).to(device, dtype)
    gate_up = (random(count, 2 * inner, hidden) / hidden**0.5).to(device, dtype)
    down = (random(count, hidden, inner) / inner**0.5).to(device, dtype)
    return x, ids.to(device), weights.to(device), gate_up, down


def check(given: Given, y: torch.Tensor) -> None:
    x, *rest = given
    assert y.dtype == x.dtype and y.shape == x.shape
    error = (y.double() - reference(x.double(), *rest)).abs()
    assert bool((error <= experts_bound(x, *rest, dtype=x.dtype)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(1, 60, 28, 5, 3), (63, 128, 60, 2, 1), (7, 60, 130, 1, 1), (5, 20, 12, 3, 3)],
    ids=str,
)
def test_is_exact_within_the_bound(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, deterministic: bool, device: str
) -> None:
    given = made(*sizes, dtype, device)
    check(given, experts(*given, deterministic=deterministic))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_thousand_rows(deterministic: bool, device: str) -> None:
    given = made(1000, 4, 3, 2, 1, torch.float32, device)
    check(given, experts(*given, deterministic=deterministic))


@pytest.mark.parametrize("deterministic", [False, True])
def test_unused_slots_idle_experts_and_an_expert_twice(deterministic: bool, device: str) -> None:
    given = made(9, 20, 12, 6, 3, torch.float32, device)
    x, ids, weights, _, _ = given
    ids[ids == 4] = 1
    ids[2, 1], ids[5] = -1, -1
    weights[ids < 0] = torch.nan
    y = experts(*given, deterministic=deterministic)
    check(given, y)
    assert bool((y[5] == 0).all())
    ids.fill_(-1)
    assert not experts(*given, deterministic=deterministic).any()
    none = experts(x[:0], ids[:0], weights[:0], *given[3:], deterministic=deterministic)
    assert none.shape == (0, 20)


@pytest.mark.parametrize(
    ("dtype", "hidden", "by_expert"),
    [
        (torch.float32, 60, False),
        (torch.bfloat16, 128, False),
        (torch.bfloat16, 60, True),
        (torch.float16, 60, False),
    ],
    ids=str,
)
def test_deterministic_gives_a_row_the_same_bits_in_any_batch(
    dtype: torch.dtype, hidden: int, by_expert: bool, device: str
) -> None:
    # more rows an expert than a tile has
    x, ids, weights, gate_up, down = made(34, hidden, 12, 2, 2, dtype, device)

    def run(rows: torch.Tensor) -> torch.Tensor:
        some = x[rows], ids[rows], weights[rows]
        return experts(*some, gate_up, down, deterministic=True, by_expert=by_expert)

    rows = torch.arange(34, device=device)
    whole = run(rows)
    for some in (rows[:1], rows[33:], rows.flip(0)[:9]):
        assert torch.equal(run(some), whole[some])


def test_fast_chooses_tiles_by_the_rows_of_an_expert(device: str) -> None:
    x, ids, weights, gate_up, down = made(80, 200, 16, 1, 1, torch.float32, device)
    for deterministic in (False, True):
        whole = experts(x, ids, weights, gate_up, down, deterministic=deterministic)
        alone = experts(x[:1], ids[:1], weights[:1], gate_up, down, deterministic=deterministic)
        assert torch.equal(alone, whole[:1]) == deterministic


def test_fast_splits_a_sum_where_programs_are_few(device: str) -> None:
    # as many tiles as experts, and the same ones for a row alone
    x, ids, weights, gate_up, down = made(70, 16, 256, 70, 1, torch.float32, device)
    whole = experts(x, ids, weights, gate_up, down, deterministic=False)
    alone = experts(x[:9], ids[:9], weights[:9], gate_up, down, deterministic=False)
    assert not torch.equal(alone, whole[:9])


def test_the_sum_is_by_slots_or_by_experts(device: str) -> None:
    x, ids, weights, gate_up, down = made(6, 20, 12, 5, 5, torch.float32, device)
    by_slot = experts(x, ids, weights, gate_up, down, deterministic=True)
    turned = experts(x, ids.flip(1), weights.flip(1), gate_up, down, deterministic=True)
    assert not torch.equal(by_slot, turned)
    given = gate_up, down
    by_expert = experts(x, ids, weights, *given, deterministic=True, by_expert=True)
    turned = experts(x, ids.flip(1), weights.flip(1), *given, deterministic=True, by_expert=True)
    assert torch.equal(by_expert, turned)
    order = ids.argsort(1)
    sorted_slots = ids.gather(1, order), weights.gather(1, order)
    assert torch.equal(by_expert, experts(x, *sorted_slots, *given, deterministic=True))


def test_every_used_slot_lies_in_one_tile_of_its_expert() -> None:
    ids = torch.tensor([[3, -1], [0, 3], [3, 0], [-1, 3], [3, 3]])
    order, starts, expert, first = permute(ids, 5, 4)
    seen = []
    for of, start in zip(expert.tolist(), first.tolist(), strict=True):
        if of < 5:
            places = range(start, min(start + 4, int(starts[of + 1])))
            assert places and all(int(ids.flatten()[order[p]]) == of for p in places)
            seen += [int(order[p]) for p in places]
    assert sorted(seen) == torch.where(ids.flatten() >= 0)[0].tolist()


def test_wrong_arguments_are_named() -> None:
    x, ids, weights, gate_up, down = made(2, 6, 4, 3, 2, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"got \[2, 6\], \[3, 6, 6\] and \[3, 6, 4\]"):
        experts(x, ids, weights, gate_up[:, :6], down, deterministic=True)
    with pytest.raises(ValueError, match=r"and \[6, 4\]"):
        experts(x, ids, weights, gate_up, down[0], deterministic=True)
    with pytest.raises(ValueError, match="one dtype, got torch.float16, torch.float32"):
        experts(x.half(), ids, weights, gate_up, down, deterministic=True)
    with pytest.raises(ValueError, match=r"must lie in \[-1, 3\), got 0 to 3"):
        experts(x, torch.tensor([[0, 3], [1, 2]]), weights, gate_up, down, deterministic=True)
