"""The Triton forms of routing: right, and batch-invariant where they say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerbisect.kernels.bounds.router import router_bound, wrong_choices
from layerbisect.kernels.router import route as reference
from layerbisect.kernels.router import weigh

pytest.importorskip("triton")

from layerbisect.kernels.triton_forms.router import route  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


GROUPED = {"groups": 3, "top_groups": 2}
BIAS = random(15, seed=1) / 4
WAYS: dict[str, dict[str, Any]] = {
    "softmax": {"renormalise": False},
    "renormalised": {"renormalise": True, "scaling": 2.5},
    "after": {"renormalise": False, "softmax_after_top_k": True},
    "sigmoid": {"renormalise": False, "scoring": "sigmoid"},
    "biased softmax": {"renormalise": False, "bias": BIAS / 4},
    "best of groups": {"renormalise": True, **GROUPED},
    "deepseek": {
        "renormalise": True,
        "scoring": "sigmoid",
        "bias": BIAS,
        "scaling": 2.5,
        **GROUPED,
    },
}
OF_CHOICE = ("scoring", "softmax_after_top_k", "bias", "groups", "top_groups")
OF_WEIGHTS = ("renormalise", "scoring", "softmax_after_top_k", "scaling")


def only(way: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: way[name] for name in names if name in way}


def check(logits: torch.Tensor, top_k: int, way: dict[str, Any], deterministic: bool) -> None:
    weights, ids = route(logits, top_k, deterministic=deterministic, **way)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    assert weights.shape == ids.shape == (len(logits), top_k)
    assert not wrong_choices(logits, ids, **only(way, OF_CHOICE)).any()
    exact = weigh(logits.double(), ids, **only(way, OF_WEIGHTS))
    bound = router_bound(logits, ids, dtype=torch.float32, **only(way, OF_WEIGHTS))
    assert bool(((weights - exact).abs() <= bound).all())


def placed(way: dict[str, Any], device: str) -> dict[str, Any]:
    return way | ({"bias": way["bias"].to(device)} if "bias" in way else {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_is_exact_within_the_bound(
    way: dict[str, Any], dtype: torch.dtype, deterministic: bool, device: str
) -> None:
    logits = (4 * random(4, 15)).to(device, dtype)
    check(logits, 4, placed(way, device), deterministic)


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 1, 1), (63, 60, 2), (3, 9, 9)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_odd_sizes(rows: int, experts: int, top_k: int, deterministic: bool, device: str) -> None:
    logits = random(rows, experts).to(device)
    check(logits, top_k, {"renormalise": True}, deterministic)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_groups_of_any_size(groups: int, device: str) -> None:
    logits, bias = random(5, 6).to(device), torch.zeros(6, device=device)
    options = {"renormalise": True, "groups": groups, "top_groups": groups // 2 or 1}
    check(logits, 1, options, True)
    check(logits, 1, {**options, "bias": bias}, True)


def test_a_thousand_rows(device: str) -> None:
    check(random(1000, 40).to(device), 1, {"renormalise": False}, False)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_of_equal_scores_the_lower_number_wins(way: dict[str, Any], device: str) -> None:
    # a few values among fifteen experts, and a bias that is alike for all but some
    logits = random(6, 15).round().to(device)
    way = placed(way, device)
    if "bias" in way:
        way["bias"] = way["bias"].sign().clamp_min(0)
    _, ids = route(logits, 5, deterministic=True, **way)
    assert torch.equal(ids, reference(logits, 5, **way)[1])


def test_experts_that_are_masked_out_and_rows_that_are_no_numbers(device: str) -> None:
    masked = [1.0, -torch.inf, 2.0, -torch.inf]
    logits = torch.tensor([masked, [0.0, torch.nan, 1.0, 2.0]], device=device)
    weights, ids = route(logits, 3, deterministic=True, renormalise=True)
    expected, expected_ids = reference(logits, 3, renormalise=True)
    assert torch.equal(ids, expected_ids) and bool(weights[1].isnan().all())
    torch.testing.assert_close(weights, expected, equal_nan=True)


def test_sigmoid_scores_that_all_vanish_weigh_nothing(device: str) -> None:
    logits = torch.full((1, 4), -200.0, device=device)
    weights, ids = route(logits, 2, deterministic=True, renormalise=True, scoring="sigmoid")
    assert weights.tolist() == [[0.0, 0.0]] and ids.tolist() == [[0, 1]]


def test_no_rows_and_arguments_that_do_not_go_together() -> None:
    weights, ids = route(torch.zeros(0, 4), 2, deterministic=True, renormalise=True)
    assert weights.shape == ids.shape == (0, 2)
    with pytest.raises(ValueError, match="at least top_k=5 experts"):
        route(torch.zeros(1, 4), 5, deterministic=True, renormalise=True)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_deterministic_gives_a_row_the_same_bits_in_any_batch(
    way: dict[str, Any], device: str
) -> None:
    logits, way = random(10, 15).to(device), placed(way, device)
    whole = route(logits, 2, deterministic=True, **way)
    for at in (slice(5, 6), slice(1, 9)):
        some = route(logits[at], 2, deterministic=True, **way)
        assert torch.equal(some[0], whole[0][at]) and torch.equal(some[1], whole[1][at])


def test_fast_sums_the_softmax_in_an_order_that_the_batch_decides(device: str) -> None:
    logits = random(64, 100).to(device)

    def changed(deterministic: bool, **way: Any) -> int:
        whole, ids = route(logits, 2, deterministic=deterministic, **way)
        some, some_ids = route(logits[:9], 2, deterministic=deterministic, **way)
        assert torch.equal(some_ids, ids[:9])
        return int((some != whole[:9]).any(1).sum())

    assert changed(False, renormalise=False) > 0
    assert changed(True, renormalise=False) == 0
    # where nothing is summed over experts, there is one order
    assert changed(False, renormalise=True, scoring="sigmoid") == 0
