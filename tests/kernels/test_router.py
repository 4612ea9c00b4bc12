"""The ways to route against transformers' routers, and against loops over rows."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerbisect.kernels.router import route, weigh

EXPERTS = 12


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def transformers_router(model: str, name: str, **config: Any) -> Any:
    """Make a router whose logits are its input: its weight is the identity."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    sizes = {"hidden_size": EXPERTS, "num_experts": EXPERTS, "num_local_experts": EXPERTS}
    router = getattr(module, name)(SimpleNamespace(**sizes, **config))
    torch.nn.init.eye_(router.weight)
    return router


@pytest.mark.parametrize("renormalise", [True, False])
def test_qwen3_moe_of_transformers_routes_alike(renormalise: bool) -> None:
    pytest.importorskip("transformers")
    router = transformers_router(
        "qwen3_moe",
        "Qwen3MoeTopKRouter",
        num_experts_per_tok=3,
        norm_topk_prob=renormalise,
    )
    logits = random(40, EXPERTS).float()
    with torch.no_grad():
        _, expected, expected_ids = router(logits)
    weights, ids = route(logits, 3, renormalise=renormalise)
    assert torch.equal(ids, expected_ids) and torch.equal(weights, expected)


def test_gpt_oss_of_transformers_routes_alike() -> None:
    pytest.importorskip("transformers")
    router = transformers_router("gpt_oss", "GptOssTopKRouter", num_experts_per_tok=4)
    logits = random(40, EXPERTS).float()
    with torch.no_grad():
        _, expected, expected_ids = router(logits)
    weights, ids = route(logits, 4, renormalise=False, softmax_after_top_k=True)
    assert torch.equal(ids, expected_ids) and torch.equal(weights, expected)
    # they add up to one already
    renormalised, _ = route(logits, 4, renormalise=True, softmax_after_top_k=True)
    assert torch.equal(renormalised, weights)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(4, 2), (3, 1), (1, 1), (6, 6)])
def test_deepseek_v3_of_transformers_routes_alike(
    groups: int, top_groups: int, renormalise: bool
) -> None:
    pytest.importorskip("transformers")
    router = transformers_router(
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        num_experts_per_tok=3,
        norm_topk_prob=renormalise,
        routed_scaling_factor=2.5,
        n_group=groups,
        topk_group=top_groups,
    )
    bias = random(EXPERTS, seed=1).float() / 4
    router.e_score_correction_bias = bias
    logits = random(40, EXPERTS).float()
    with torch.no_grad():
        _, expected, expected_ids = router(logits)
    weights, ids = route(
        logits,
        3,
        renormalise=renormalise,
        scoring="sigmoid",
        bias=bias,
        groups=groups,
        top_groups=top_groups,
        scaling=2.5,
    )
    # they come in any order there
    at = expected_ids.argsort(1), ids.argsort(1)
    assert torch.equal(ids.gather(1, at[1]), expected_ids.gather(1, at[0]))
    torch.testing.assert_close(weights.gather(1, at[1]), expected.gather(1, at[0]))
    # the bias changed the choice, and the groups did where they can
    assert not torch.equal(ids.sort(1).values, logits.topk(3).indices.sort(1).values)


def test_slots_are_in_the_order_of_biased_scores_and_weigh_without_it() -> None:
    logits, bias = random(9, EXPERTS), random(EXPERTS, seed=1)
    weights, ids = route(logits, 3, renormalise=False, scoring="sigmoid", bias=bias)
    biased = 1 / (1 + torch.exp(-logits)) + bias
    assert torch.equal(ids, biased.topk(3).indices)
    torch.testing.assert_close(weights, (biased - bias).gather(1, ids))


def test_a_softmax_may_have_a_bias_too() -> None:
    logits, bias = random(9, EXPERTS), random(EXPERTS, seed=1)
    weights, ids = route(logits, 3, renormalise=False, bias=bias)
    probabilities = logits.exp() / logits.exp().sum(1, keepdim=True)
    assert torch.equal(ids, (probabilities + bias).topk(3).indices)
    torch.testing.assert_close(weights, probabilities.gather(1, ids))


def test_without_a_bias_a_group_counts_by_its_best_expert() -> None:
    # the second group has the larger sum of two, and the first the best expert
    logits = torch.tensor([[3.0, 0.0, 2.5, 2.0, 1.0, 1.0]])
    _, ids = route(logits, 2, renormalise=True, groups=3, top_groups=1)
    assert ids.tolist() == [[0, 1]]
    bias = torch.zeros(6)
    _, ids = route(
        logits, 2, renormalise=True, scoring="sigmoid", bias=bias, groups=3, top_groups=1
    )
    assert ids.tolist() == [[2, 3]]


def test_of_equal_scores_the_lower_number_wins() -> None:
    bias = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    _, ids = route(torch.zeros(1, 6), 4, renormalise=True, scoring="sigmoid", bias=bias)
    assert ids.tolist() == [[1, 3, 0, 2]]
    _, ids = route(torch.zeros(1, 6), 3, renormalise=True, groups=3, top_groups=2)
    assert ids.tolist() == [[0, 1, 2]]


def test_an_expert_outside_the_best_groups_is_not_chosen_for_one_that_scores_nothing() -> None:
    # a masked expert scores minus infinity, and lies outside
    logits = torch.tensor([[0.0, 0.0, 5.0, -torch.inf]])
    _, ids = route(logits, 2, renormalise=False, groups=2, top_groups=1)
    assert ids.tolist() == [[2, 3]]


def test_sigmoid_scores_that_all_vanish_weigh_nothing() -> None:
    weights, _ = route(torch.full((1, 4), -200.0), 2, renormalise=True, scoring="sigmoid")
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "options",
    [
        {"renormalise": True},
        {"renormalise": False, "softmax_after_top_k": True},
        {"renormalise": True, "scoring": "sigmoid", "scaling": 2.5},
    ],
)
def test_any_choice_can_be_weighed(options: dict[str, Any]) -> None:
    logits = random(9, EXPERTS)
    weights, ids = route(logits, 3, **options)
    assert torch.equal(weigh(logits, ids, **options), weights)
    turned = weigh(logits, ids.flip(1), **options)
    torch.testing.assert_close(turned.flip(1), weights, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "softplus"}, "must be 'softmax' or 'sigmoid', got 'softplus'"),
        ({"bias": torch.zeros(5)}, r"bias must have shape \[12\], got \[5\]"),
        ({"softmax_after_top_k": True, "scoring": "sigmoid"}, "leave out scoring 'sigmoid'"),
        ({"softmax_after_top_k": True, "bias": torch.zeros(12)}, "leave out a bias"),
        ({"groups": 4}, "together or neither, got 4 and None"),
        ({"groups": 5, "top_groups": 2}, "must divide the 12 experts .*, got 5 and 2"),
        ({"groups": 4, "top_groups": 5}, "lie in .1, groups., got 4 and 5"),
        ({"groups": 6, "top_groups": 1}, "1 groups of 2 experts hold fewer than top_k=3"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(random(2, EXPERTS), 3, renormalise=True, **options)
