"""Weights that differ by rounding are within the bound, and choices that do are near ties."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.kernels.bounds.router import router_bound, wrong_choices
from layerbisect.kernels.router import route, weigh

EXPERTS = 12
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WAYS: dict[str, dict[str, Any]] = {
    "softmax": {"renormalise": False},
    "renormalised": {"renormalise": True},
    "after": {"renormalise": False, "softmax_after_top_k": True},
    "sigmoid": {"renormalise": False, "scoring": "sigmoid"},
    "deepseek": {"renormalise": True, "scoring": "sigmoid", "scaling": 2.5},
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stepwise(logits: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype, way: Any) -> torch.Tensor:
    """Weigh as an engine that rounds every intermediate to ``dtype``."""
    if way.get("softmax_after_top_k"):
        scores = torch.softmax(logits.gather(1, ids), 1).to(dtype)
    elif way.get("scoring") == "sigmoid":
        scores = torch.sigmoid(logits).to(dtype).gather(1, ids)
    else:
        scores = torch.softmax(logits, 1).to(dtype).gather(1, ids)
    if way["renormalise"]:
        scores = scores / scores.sum(1, keepdim=True)
    scaling: float = way.get("scaling", 1.0)
    return scores * scaling


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_weights_in_low_precision_are_within_the_bound(
    way: dict[str, Any], dtype: torch.dtype, spread: float
) -> None:
    logits = random(300, EXPERTS) * spread
    _, ids = route(logits, 3, **way)
    exact = weigh(logits.double(), ids, **way)
    bound = router_bound(logits, ids, dtype=dtype, **way)
    error = (stepwise(logits, ids, dtype, way).double() - exact).abs()
    assert (error <= bound).all()
    # and the bound is no licence: a few roundings of the weight, and of its score's exponent
    least = 2 * torch.finfo(dtype).smallest_normal
    size = exact * torch.finfo(dtype).eps + least * torch.finfo(dtype).eps
    # a score that is subnormal in float16 may lose all in a quotient by others that are
    typical = (logits.gather(1, ids) > -6).all(1) & (exact > 1e-3).all(1)
    assert (bound < (30 + 4 * spread) * size)[typical].all() and typical.any()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_weights_that_are_off_by_little_are_beyond_the_bound(way: dict[str, Any]) -> None:
    logits = random(50, EXPERTS)
    weights, ids = route(logits.double(), 3, **way)
    for dtype, gain in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        assert (weights * gain > router_bound(logits, ids, dtype=dtype, **way)).all()


CHOICES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "after": {"softmax_after_top_k": True},
    "sigmoid": {"scoring": "sigmoid"},
    "biased": {"scoring": "sigmoid", "bias": random(EXPERTS, seed=1) / 4},
    "biased softmax": {"bias": random(EXPERTS, seed=1) / 20},
    "groups": {"groups": 4, "top_groups": 2},
    "deepseek": {
        "scoring": "sigmoid",
        "bias": random(EXPERTS, seed=1) / 4,
        "groups": 4,
        "top_groups": 2,
    },
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_the_references_choice_is_right_and_another_expert_is_wrong(choice: dict[str, Any]) -> None:
    logits = random(200, EXPERTS)
    for dtype in (torch.float32, torch.float64):
        _, ids = route(logits.to(dtype), 3, renormalise=True, **choice)
        assert not wrong_choices(logits, ids, **choice).any()
        assert not wrong_choices(logits, ids.flip(1), **choice).any()
    _, more = route(logits, 5, renormalise=True, **choice)
    swapped = torch.cat([more[:, :2], more[:, 4:]], 1)
    assert wrong_choices(logits, swapped, **choice).all()


def test_numbers_that_are_no_choice_are_wrong() -> None:
    logits = torch.tensor([[5.0, 4.0, 1.0]]).expand(6, -1)
    ids = torch.tensor([[0, 1], [0, 0], [1, 3], [-1, 0], [-(2**63), 1], [1, 0]])
    assert wrong_choices(logits, ids).tolist() == [False, True, True, True, True, False]
    blank = torch.full((2, 3), torch.nan)
    assert wrong_choices(blank, torch.tensor([[0, 1], [0, 0]])).tolist() == [False, True]


def test_what_float32_scores_cannot_tell_apart_is_a_near_tie() -> None:
    # float32 softmax of both is the same number, and their logits differ
    logits = torch.tensor([[-1e-8, 0.0, -9.0], [-1e-4, 0.0, -9.0], [0.0, 0.0, -9.0]])
    ids = torch.tensor([[0], [0], [1]])
    assert wrong_choices(logits, ids).tolist() == [False, True, False]
    assert wrong_choices(logits, ids, softmax_after_top_k=True).tolist() == [True, True, False]
    assert not wrong_choices(logits, ids, dtype=torch.bfloat16).any()
    # sigmoid is 1 in float32 from 17 on
    high = torch.tensor([[20.0, 30.0]])
    assert not wrong_choices(high, torch.tensor([[0]]), scoring="sigmoid").any()
    assert wrong_choices(high, torch.tensor([[0]])).all()


@pytest.mark.parametrize("left_out", ["bias", "groups", "sum of two"])
def test_a_step_that_is_left_out_is_seen(left_out: str) -> None:
    logits, choice = random(200, EXPERTS), CHOICES["deepseek"]
    wrong = dict(choice)
    if left_out == "bias":
        wrong["bias"] = torch.zeros(EXPERTS)
    elif left_out == "groups":
        wrong |= {"groups": None, "top_groups": None}
    else:
        # a bias that changes no score, so that the best expert of a group counts
        choice = {**choice, "bias": torch.zeros(EXPERTS)}
        del wrong["bias"]
    _, ids = route(logits, 3, renormalise=True, **wrong)
    right = route(logits.double(), 3, renormalise=True, **choice)[1]
    other = (ids.sort(1).values != right.sort(1).values).any(1)
    assert other.sum() > 20
    assert torch.equal(wrong_choices(logits, ids, **choice), other)


def may_be_chosen(scores: list[int], ids: list[int], groups: int, top_groups: int) -> bool:
    """Try every set of groups: ties may fall either way."""
    size = len(scores) // groups
    best = [max(scores[g * size : (g + 1) * size]) for g in range(groups)]
    for taken in combinations(range(groups), top_groups):
        least = min(best[g] for g in taken)
        if any(best[g] > least for g in range(groups) if g not in taken):
            continue
        eligible = {e for g in taken for e in range(g * size, (g + 1) * size)}
        worst = min(scores[e] for e in ids)
        if set(ids) <= eligible and all(scores[e] <= worst for e in eligible - set(ids)):
            return True
    return False


@given(
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
    st.permutations(range(8)),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_choices_within_groups_follow_their_definition(
    scores: list[int], order: list[int], groups: int, top_groups: int, top_k: int
) -> None:
    top_groups = min(top_groups, groups)
    top_k = min(top_k, top_groups * 8 // groups)
    ids = torch.tensor([order[:top_k], route_ids(scores, top_k, groups, top_groups)])
    logits = torch.tensor([scores, scores], dtype=torch.float32)
    options: dict[str, Any] = {
        "softmax_after_top_k": True,
        "groups": groups,
        "top_groups": top_groups,
    }
    found = wrong_choices(logits, ids, **options).tolist()
    assert found == [not may_be_chosen(scores, i, groups, top_groups) for i in ids.tolist()]
    assert not found[1]


def route_ids(scores: list[int], top_k: int, groups: int, top_groups: int) -> list[int]:
    logits = torch.tensor([scores], dtype=torch.float32)
    _, ids = route(logits, top_k, renormalise=False, groups=groups, top_groups=top_groups)
    chosen: list[int] = ids[0].tolist()
    return chosen
