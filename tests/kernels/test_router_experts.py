"""Routing and the gated networks against loops over rows and slots."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels.experts import Order, combine, expert_outputs, experts, swiglu_mlp
from layerbisect.kernels.router import route

EXPERTS, HIDDEN, INNER = 5, 12, 7


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_route_keeps_the_largest_probabilities_in_order() -> None:
    logits = random(9, EXPERTS)
    weights, ids = route(logits, 2, renormalise=False)
    for row in range(9):
        probabilities = logits[row].exp() / logits[row].exp().sum()
        best = sorted(range(EXPERTS), key=lambda expert: -float(logits[row, expert]))[:2]
        assert ids[row].tolist() == best
        torch.testing.assert_close(weights[row], probabilities[best])


def test_renormalised_weights_add_up_to_one() -> None:
    weights, ids = route(random(9, EXPERTS), 3, renormalise=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(9).double())
    assert ids.dtype == torch.int64


def test_of_equal_logits_the_lower_expert_wins() -> None:
    _, ids = route(torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]]), 4, renormalise=True)
    assert ids.tolist() == [[1, 2, 4, 0]]


def test_route_rounds_the_weights_alone() -> None:
    logits = random(9, EXPERTS).float()
    exact, ids = route(logits, 2, renormalise=True)
    rough, same_ids = route(logits, 2, renormalise=True, round_to=torch.bfloat16)
    assert torch.equal(rough, exact.bfloat16().float())
    assert torch.equal(ids, same_ids)


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def test_swiglu_follows_its_formula() -> None:
    x, gate, up, down = (
        random(4, HIDDEN),
        random(INNER, HIDDEN, seed=1),
        random(INNER, HIDDEN, seed=2),
        random(HIDDEN, INNER, seed=3),
    )
    expected = (silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(swiglu_mlp(x, gate, up, down), expected)


def test_low_precision_swiglu_rounds_every_intermediate() -> None:
    x, gate, up, down = (
        random(4, HIDDEN).bfloat16(),
        random(INNER, HIDDEN, seed=1).bfloat16(),
        random(INNER, HIDDEN, seed=2).bfloat16(),
        random(HIDDEN, INNER, seed=3).bfloat16(),
    )
    inner = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    rough = swiglu_mlp(x.float(), gate, up, down, round_to=torch.bfloat16)
    torch.testing.assert_close(rough, (inner @ down.T).float(), rtol=2**-7, atol=2**-6)
    assert torch.equal(rough, rough.bfloat16().float())


@pytest.fixture
def routed() -> tuple[torch.Tensor, ...]:
    x = random(11, HIDDEN)
    weights, ids = route(random(11, EXPERTS, seed=1), 2, renormalise=True)
    gate_up = random(EXPERTS, 2 * INNER, HIDDEN, seed=2)
    return x, ids, weights, gate_up, random(EXPERTS, HIDDEN, INNER, seed=3)


def by_hand(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    total = torch.zeros_like(x)
    for row in range(len(x)):
        for slot, expert in enumerate(ids[row].tolist()):
            if expert >= 0:
                gate, up = gate_up[expert].chunk(2)
                out = swiglu_mlp(x[row : row + 1], gate, up, down[expert])[0]
                total[row] += weights[row, slot] * out
    return total


def test_experts_are_summed_by_weight(routed: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(experts(*routed), by_hand(*routed))


def test_unused_slots_and_repeated_experts(routed: tuple[torch.Tensor, ...]) -> None:
    x, ids, weights, gate_up, down = routed
    ids[3, 1] = -1
    weights[3, 1] = torch.nan
    ids[4] = 2
    # by_hand skips the nan of the unused slot too
    torch.testing.assert_close(
        experts(x, ids, weights, gate_up, down), by_hand(x, ids, weights, gate_up, down)
    )


def test_only_hit_experts_are_read(routed: tuple[torch.Tensor, ...]) -> None:
    x, ids, weights, gate_up, down = routed

    class Lazy:
        def __init__(self, held: torch.Tensor) -> None:
            self.held, self.read = held, set[int]()

        def __len__(self) -> int:
            return len(self.held)

        def __getitem__(self, expert: int, /) -> torch.Tensor:
            self.read.add(expert)
            return self.held[expert]

    lazy = Lazy(gate_up), Lazy(down)
    few = ids.remainder(3)
    torch.testing.assert_close(
        experts(x, few, weights, *lazy), experts(x, few, weights, gate_up, down)
    )
    assert lazy[0].read == lazy[1].read == set(few.unique().tolist())


def test_low_precision_experts_round_after_every_expert(
    routed: tuple[torch.Tensor, ...],
) -> None:
    x, ids, weights, gate_up, down = (
        part if part.dtype == torch.int64 else part.bfloat16().float() for part in routed
    )
    rough = experts(x, ids, weights, gate_up, down, round_to=torch.bfloat16)
    total = torch.zeros(11, HIDDEN, dtype=torch.bfloat16)
    for expert in range(EXPERTS):
        for row, slot in torch.nonzero(ids == expert).tolist():
            gate, up = gate_up[expert].chunk(2)
            out = swiglu_mlp(x[row : row + 1], gate, up, down[expert], round_to=torch.bfloat16)
            total[row] += (out[0] * weights[row, slot]).bfloat16()
    torch.testing.assert_close(rough, total.float(), rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("round_to", [None, torch.bfloat16])
def test_the_outputs_of_the_slots_combine_to_what_the_experts_make(
    routed: tuple[torch.Tensor, ...], round_to: torch.dtype | None
) -> None:
    x, ids, weights, gate_up, down = routed
    ids[3, 1] = -1
    weights[3, 1] = torch.nan
    by_slot = x[:, None].expand(-1, 2, -1)
    outputs = expert_outputs(by_slot, ids, weights, gate_up, down, round_to=round_to)
    assert outputs.shape == (11, 2, HIDDEN) and not outputs[3, 1].any()
    whole = experts(x, ids, weights, gate_up, down, round_to=round_to)
    torch.testing.assert_close(combine(outputs, ids, round_to=round_to), whole, rtol=0, atol=0)


def test_each_slot_has_an_input_of_its_own(routed: tuple[torch.Tensor, ...]) -> None:
    x, ids, weights, gate_up, down = routed
    by_slot = torch.stack([x, x.flip(0)], 1)
    outputs = expert_outputs(by_slot, ids, weights, gate_up, down)
    for slot in range(2):
        alone = ids[:, slot : slot + 1], weights[:, slot : slot + 1]
        made = experts(by_slot[:, slot], *alone, gate_up, down)
        torch.testing.assert_close(outputs[:, slot], made)


def test_low_precision_combine_rounds_after_every_slot_by_the_numbers_of_experts() -> None:
    # in this order 1 + 1/256 is rounded away first, and in the other 2/256 is not
    outputs = torch.tensor([[[2**-8], [2**-8], [1.0]]]).expand(2, 3, 1)
    ids = torch.tensor([[1, 2, 0], [0, 1, 2]])
    rough = combine(outputs, ids, round_to=torch.bfloat16)
    assert rough.tolist() == [[1.0], [1.0 + 2**-7]]
    assert combine(outputs, ids).tolist() == [[1.0 + 2**-7]] * 2


@pytest.mark.parametrize(
    ("order", "sums"),
    [
        # 1 + 2^-8 is a tie that goes to 1, and 1 + 2^-7 is a number of bfloat16
        ("expert", [1.0, 1.0 + 2**-7]),
        ("slot", [1.0 + 2**-7, 1.0]),
        ("once", [1.0 + 2**-7, 1.0 + 2**-7]),
    ],
)
def test_the_sum_is_rounded_in_the_order_that_was_asked_for(
    order: Order, sums: list[float]
) -> None:
    tiny = 2**-8
    outputs = torch.tensor([[tiny, tiny, 1.0, torch.nan], [1.0, tiny, torch.nan, tiny]])[..., None]
    ids = torch.tensor([[1, 2, 0, -1], [2, 0, -1, 1]])
    rough = combine(outputs, ids, order=order, round_to=torch.bfloat16)
    assert rough[:, 0].tolist() == sums


@pytest.mark.parametrize("order", ["slot", "once"])
def test_unrounded_experts_are_the_same_in_any_order(
    routed: tuple[torch.Tensor, ...], order: Order
) -> None:
    x, ids, weights, gate_up, down = routed
    ids[3, 1] = -1
    torch.testing.assert_close(experts(*routed, order=order), experts(*routed))
    by_slot = expert_outputs(
        x[:, None].expand(-1, 2, -1), ids, weights, gate_up, down, round_to=torch.bfloat16
    )
    expected = combine(by_slot, ids, order=order, round_to=torch.bfloat16)
    assert torch.equal(experts(*routed, order=order, round_to=torch.bfloat16), expected)


def test_no_rows(routed: tuple[torch.Tensor, ...]) -> None:
    _, ids, weights, gate_up, down = routed
    empty = torch.zeros(0, HIDDEN)
    assert experts(empty, ids[:0], weights[:0], gate_up, down).shape == (0, HIDDEN)


def test_wrong_arguments_are_named(routed: tuple[torch.Tensor, ...]) -> None:
    x, ids, weights, gate_up, down = routed
    with pytest.raises(ValueError, match=r"got \[11, 2\] and \[11, 1\]"):
        experts(x, ids, weights[:, :1], gate_up, down)
    with pytest.raises(ValueError, match=r"must both have shape \[11, 3\], got \[11, 2\]"):
        expert_outputs(x[:, None].expand(-1, 3, -1), ids, weights, gate_up, down)
    with pytest.raises(ValueError, match=r"ids must have shape \[11, 3\], got \[11, 2\]"):
        combine(x[:, None].expand(-1, 3, -1), ids)
    with pytest.raises(ValueError, match="must be 'expert', 'slot' or 'once', got 'random'"):
        experts(x, ids, weights, gate_up, down, order="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must lie in \[-1, 4\), got 0 to 4"):
        experts(x, ids, weights, gate_up[:4], down[:4])
    with pytest.raises(TypeError, match="x must be float32 or float64"):
        experts(x.half(), ids, weights, gate_up, down)
    with pytest.raises(ValueError, match=r"at least top_k=6 experts, got \[11, 5\]"):
        route(random(11, EXPERTS), 6, renormalise=True)
    with pytest.raises(TypeError, match="logits must be float32 or float64"):
        route(random(11, EXPERTS).bfloat16(), 2, renormalise=True)
