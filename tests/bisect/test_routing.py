"""Routes that differ are explained or convict, on real captures of a model with near ties."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from layerbisect.bisect.routing_report import LayerRouting, Routing
from layerbisect.bisect.selection import largest
from layerbisect.bisect.verdict import Culprit, Verdict
from layerbisect.captures.format import How
from layerbisect.captures.store import Capture
from layerbisect.kernels.judging.choices import rounding_of_choice
from tests.bisect.making import rewrite
from tests.bisect.tied_routers import CHOSEN, EXPERTS, LAYERS, Choice, Tied

SIDES = ("rollout", "trainer")
AT = 1
"""The layer in which something is planted."""


@pytest.fixture(scope="module")
def clean(tied: Tied) -> Verdict:
    return tied.judge()


def routing(verdict: Verdict) -> Routing:
    assert verdict.routing is not None
    return verdict.routing


def layer(verdict: Verdict, number: int = AT) -> LayerRouting:
    return next(one for one in routing(verdict).layers if one.layer == number)


def causes(one: LayerRouting) -> dict[str, int]:
    """Causes that there are, which add up to the flips."""
    assert one.explained is not None
    assert sum(one.explained.causes.values()) == one.flips
    return {cause: n for cause, n in one.explained.causes.items() if n}


def only_culprit(verdict: Verdict, point: str, operator: str, side: str) -> Culprit:
    assert verdict.status == "divergent"
    (culprit,) = verdict.culprits
    assert (culprit.point, culprit.operator, culprit.side) == (point, operator, side)
    return culprit


# --- nothing planted


def test_clean_flips_are_all_explained(clean: Verdict) -> None:
    assert clean.status == "agree" and not clean.culprits, clean.reasons
    told = routing(clean)
    assert [one.layer for one in told.layers] == list(range(LAYERS))
    assert told.flips >= 10
    assert told.causes["unexplained"] == 0
    assert sum(told.causes.values()) == told.flips
    assert told.causes["near tie"] > told.flips / 2
    # rounding was given no time to grow
    assert set(causes(told.layers[0])) == {"near tie"}


def test_what_is_counted_is_what_the_captures_hold(tied: Tied, clean: Verdict) -> None:
    a, b = (Capture.open(tied.clean[side]) for side in SIDES)
    seen = np.zeros(len(a.rows), bool)
    for one in routing(clean).layers:
        name = f"layers.{one.layer}.mlp.expert_ids"
        ours, theirs = (np.sort(c.read(name), 1) for c in (a, b))
        flips = (ours != theirs).any(1)
        shared = [len(set(x) & set(y)) for x, y in zip(ours, theirs, strict=True)]
        assert (one.rows, one.flips) == (len(a.rows), int(flips.sum()))
        assert one.first == int((flips & ~seen).sum())
        assert one.overlap == pytest.approx(np.mean(shared) / CHOSEN)
        seen |= flips
    gaps = routing(clean).gaps
    apart = np.abs(a.scores.logprob - b.scores.logprob)
    places = {key: i for i, key in enumerate(zip(a.rows.sequence, a.rows.position, strict=True))}
    row = [
        places[s, p - 1]
        for s, p in zip(a.scores.rows.sequence, a.scores.rows.position, strict=True)
    ]
    assert gaps["rerouted"].tokens == int(seen[row].sum())
    assert gaps["rerouted"].mae == pytest.approx(float(apart[seen[row]].mean()))
    others = [gaps["same"], gaps["context"]]
    assert sum(g.tokens for g in others) == int((~seen[row]).sum())
    assert gaps["same"].mae is not None and gaps["rerouted"].mae is not None
    # experts differ, so a token that goes to another one moves
    assert gaps["rerouted"].mae > 2 * gaps["same"].mae


def test_a_rerouted_token_leaves_the_layer_elsewhere(clean: Verdict) -> None:
    for one in routing(clean).layers:
        assert one.stream_same is not None and one.stream_rerouted is not None
        assert one.stream_rerouted > 3 * one.stream_same


def test_an_engine_against_itself_has_no_flips(tied: Tied, tmp_path: Path) -> None:
    again = rewrite(tied.clean["trainer"], tmp_path / "again", label="rollout")
    told = routing(tied.judge({"rollout": again}))
    assert told.flips == 0 and all(one.explained is None for one in told.layers)
    assert [(one.overlap, one.weights_max, one.order) for one in told.layers] == [
        (1.0, 0.0, 0.0)
    ] * LAYERS


# --- the router, or what follows it


@pytest.mark.parametrize("side", SIDES)
def test_a_low_precision_router(tied: Tied, side: str, tmp_path: Path) -> None:
    made = tied.faulty(side, tmp_path / "made", ("router-low-precision", AT))
    verdict = tied.judge({side: made})
    culprit = only_culprit(verdict, f"layers.{AT}.mlp.router_logits", "router", side)
    told = layer(verdict)
    assert told.explained is not None
    assert told.explained.by_router == told.explained.causes["unexplained"] > 0.8 * told.flips
    # its logits are wrong, and what it chose by them is right
    assert told.explained.astray == {"rollout": 0, "trainer": 0}
    assert f"{told.explained.by_router} of {told.flips} routes that differ" in culprit.evidence[0]
    # a fault does not widen what counts as rounding
    assert told.explained.logits_differ is not None
    assert told.explained.logits_differ > 2 * told.explained.noise
    assert all("unexplained" not in causes(layer(verdict, n)) for n in (0, 2))


@pytest.mark.parametrize("side", SIDES)
def test_swapped_experts_do_not_accuse_the_router(tied: Tied, side: str, tmp_path: Path) -> None:
    made = tied.faulty(side, tmp_path / "made", ("experts-swapped", AT))
    verdict = tied.judge({side: made})
    only_culprit(verdict, f"layers.{AT}.mlp.out", "experts", side)
    assert routing(verdict).causes["unexplained"] == 0


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fault", ["softmax-scale", "residual-dropped"])
def test_a_fault_upstream_is_inherited(
    tied: Tied, clean: Verdict, fault: str, side: str, tmp_path: Path
) -> None:
    made = tied.faulty(side, tmp_path / "made", (fault, 0))
    verdict = tied.judge({side: made})
    assert [(c.layer, c.side) for c in verdict.culprits] == [(0, side)]
    assert verdict.culprits[0].operator != "router"
    told = routing(verdict)
    assert told.causes["unexplained"] == 0
    if fault == "residual-dropped":
        # the logits cross by far more than rounding makes of them
        assert causes(layer(verdict, 0))["inherited"] >= 5
        assert "inherited" not in causes(layer(clean, 0))
        assert causes(layer(verdict, 2))["consequence"] > 0


@pytest.mark.parametrize("side", SIDES)
def test_weights_that_are_not_renormalised(
    tied: Tied, clean: Verdict, side: str, tmp_path: Path
) -> None:
    made = tied.faulty(side, tmp_path / "made", ("top-k-not-renormalised", AT))
    verdict = tied.judge({side: made})
    only_culprit(verdict, f"layers.{AT}.mlp.expert_weights", "router", side)
    told, before = layer(verdict), layer(clean)
    # the same experts, with other weights
    assert (told.flips, told.overlap) == (before.flips, before.overlap)
    assert "unexplained" not in causes(told)
    assert told.weights_mean is not None and before.weights_mean is not None
    assert told.weights_mean > 20 * before.weights_mean


# --- the selection


def weighed(logits: torch.Tensor, like: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    chosen = logits.float().softmax(-1).gather(1, ids)
    return (chosen / chosen.sum(-1, keepdim=True)).to(like.dtype)


def best(logits: torch.Tensor, count: int) -> torch.Tensor:
    return logits.float().topk(count, -1).indices


def drops_the_best(
    logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wrong = best(logits, CHOSEN + 1)[:, 1:]
    return weighed(logits, weights, wrong), wrong


def takes_the_next(
    logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wrong = best(logits, CHOSEN + 1)[:, [*range(CHOSEN - 1), CHOSEN]]
    return weighed(logits, weights, wrong), wrong


def takes_the_next_in_few(
    logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wrong = ids.clone()
    wrong[5::8] = drops_the_best(logits, weights, ids)[1][5::8]
    return weighed(logits, weights, wrong), wrong


def numbers_are_off_by_one(
    logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # as where a rank adds the wrong offset: the weights stay those of the right experts
    return weights, (ids + 1) % EXPERTS


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "choice", [drops_the_best, takes_the_next, takes_the_next_in_few, numbers_are_off_by_one]
)
def test_the_selection_is_convicted_and_not_the_router(
    tied: Tied, clean: Verdict, choice: Choice, side: str, tmp_path: Path
) -> None:
    made = tied.choosing(side, tmp_path / "made", AT, choice)
    verdict = tied.judge({side: made})
    culprit = only_culprit(verdict, f"layers.{AT}.mlp.expert_ids", "router", side)
    assert "the selection, not the router's logits" in culprit.evidence[0]
    told = layer(verdict).explained
    assert told is not None
    other = SIDES[1 - SIDES.index(side)]
    assert told.astray[side] > 0 and told.astray[other] == 0
    assert f"in {told.astray[side]} of {layer(verdict).rows} rows" in culprit.evidence[0]
    assert f"in {told.same_logits} of {layer(verdict).flips} routes" in culprit.evidence[0]
    assert told.same_logits > 0 and told.by_router == 0
    assert (
        told.causes["unexplained"] >= max(told.astray[side], told.same_logits) - layer(clean).flips
    )
    # what follows is a consequence, and accuses no other layer
    assert all("unexplained" not in causes(layer(verdict, n)) for n in (0, 2))
    first = told.examples[0]
    assert first.cause == "unexplained" and first.margins is not None
    # one side's own logits speak against its choice
    assert min(first.margins) < 0 < max(first.margins)


def test_fewer_experts_than_the_model_chooses(tied: Tied, tmp_path: Path) -> None:
    gate = tied.engines["rollout"].model.model.layers[AT].mlp.gate
    gate.top_k = 1
    try:
        made = tied.faulty("rollout", tmp_path / "made")
    finally:
        gate.top_k = CHOSEN
    verdict = tied.judge({"rollout": made})
    assert all(c.operator == "router" and c.layer == AT for c in verdict.culprits)
    told = layer(verdict)
    assert told.flips == told.rows and told.overlap == pytest.approx(1 / CHOSEN, abs=0.02)
    assert causes(told) == {"unexplained": told.flips}
    assert told.explained is not None and told.explained.examples[0].margins is None
    assert told.order is None


class InOneRow:
    """Leaves one row of all without the expert that is ahead by ``least`` to ``most``."""

    def __init__(self, least: float, most: float) -> None:
        self.within = (least, most)
        self.done = False

    def __call__(
        self, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        top = logits.float().topk(CHOSEN + 1).values
        ahead = top[:, -2] - top[:, -1]
        rows = ((ahead > self.within[0]) & (ahead < self.within[1])).nonzero().flatten()
        if self.done or not len(rows):
            return weights, ids
        self.done = True
        wrong = ids.clone()
        wrong[rows[0]] = takes_the_next(logits, weights, ids)[1][rows[0]]
        return weighed(logits, weights, wrong), wrong


@pytest.mark.parametrize("side", SIDES)
def test_one_choice_against_its_own_logits_convicts(tied: Tied, side: str, tmp_path: Path) -> None:
    made = tied.choosing(side, tmp_path / "made", AT, InOneRow(0.03, 0.06))
    verdict = tied.judge({side: made})
    only_culprit(verdict, f"layers.{AT}.mlp.expert_ids", "router", side)
    told = layer(verdict).explained
    assert told is not None and told.astray[side] == 1
    # of two sides of which one always follows its logits, one route is not explained
    assert told.causes["unexplained"] == 1


def test_unexplained_routes_are_no_agreement(tied: Tied, tmp_path: Path) -> None:
    whole = tied.choosing("rollout", tmp_path / "whole", AT, InOneRow(0.05, 0.09))
    # without its own logits one row is too little to convict
    made = rewrite(whole, tmp_path / "made", points=without("router_logits"))
    verdict = tied.judge({"rollout": made})
    assert routing(verdict).causes["unexplained"] == 1
    assert verdict.status == "inconclusive" and not verdict.culprits
    assert "1 of" in verdict.reasons[0] and "are unexplained" in verdict.reasons[0]


@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.01, 1.0, 30.0, 1e4]))
def test_a_choice_by_what_was_rounded_follows(seed: int, scale: float) -> None:
    wide = scale * torch.randn(64, EXPERTS, generator=torch.Generator().manual_seed(seed))
    narrow = wide.bfloat16().float()
    scores = wide.softmax(-1)
    chosen_by = {
        # wide logits of which rounded ones are seen, and scores of what is seen, rounded or not
        "logits": (narrow, wide),
        "scores": (narrow, narrow.softmax(-1)),
        "rounded scores": (narrow, narrow.softmax(-1).bfloat16().float()),
        "wide scores": (wide, scores),
    }
    for name, (seen, by) in chosen_by.items():
        chosen = largest(by, CHOSEN)
        worst = seen.masked_fill(~chosen, torch.inf).amin(1)
        left = seen.masked_fill(chosen, -torch.inf).amax(1)
        allowed = rounding_of_choice(seen, worst, left)
        assert (left - worst <= allowed).all(), name


# --- order of slots


def turned_round(
    logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return weights.flip(1), ids.flip(1)


def by_number(
    logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    ordered, at = ids.sort(1)
    return weights.gather(1, at), ordered


@pytest.mark.parametrize("choice", [turned_round, by_number])
def test_an_order_of_slots_is_no_difference(
    tied: Tied, clean: Verdict, choice: Choice, tmp_path: Path
) -> None:
    made = tied.choosing("trainer", tmp_path / "made", AT, choice)
    verdict = tied.judge({"trainer": made})
    assert verdict.status == "agree" and not verdict.culprits
    told, before = layer(verdict), layer(clean)
    assert told.flips == before.flips and told.weights_mean == before.weights_mean
    assert told.order is not None and before.order is not None
    assert told.order > 0.5 > before.order
    for suffix in ("expert_ids", "expert_weights"):
        one, other = (
            next(d for d in v.differences if d.point == f"layers.{AT}.mlp.{suffix}")
            for v in (verdict, clean)
        )
        assert one == other


def test_weights_in_the_order_of_others_are_a_fault(
    tied: Tied, clean: Verdict, tmp_path: Path
) -> None:
    def mixed_up(
        logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return weights.roll(1, 1), ids

    made = tied.choosing("rollout", tmp_path / "made", AT, mixed_up)
    verdict = tied.judge({"rollout": made})
    only_culprit(verdict, f"layers.{AT}.mlp.expert_weights", "router", "rollout")
    (weights,) = (d for d in verdict.differences if d.point == f"layers.{AT}.mlp.expert_weights")
    assert weights.median > 0.1
    assert layer(verdict).order == layer(clean).order


def test_numbers_that_are_derived_have_no_order(tied: Tied, clean: Verdict, tmp_path: Path) -> None:
    def ascending(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if not name.endswith(("expert_ids", "expert_weights")):
            return values
        numbers = Capture.open(tied.clean["trainer"]).read(
            name.replace("expert_weights", "expert_ids")
        )
        return np.take_along_axis(values, np.argsort(numbers, 1), 1)

    def how(name: str) -> How:
        return "derived" if name.endswith("expert_ids") else "observed"

    made = rewrite(tied.clean["trainer"], tmp_path / "map", change=ascending, how=how)
    verdict = tied.judge({"trainer": made})
    assert verdict.status == "agree"
    for one, before in zip(routing(verdict).layers, routing(clean).layers, strict=True):
        assert one.order is None
        assert (one.flips, one.weights_max) == (before.flips, before.weights_max)
        assert causes(one) == causes(before)


# --- what is seen of it


def without(*suffixes: str) -> Callable[[str], bool]:
    return lambda name: not name.endswith(suffixes)


def test_logits_that_are_not_captured_are_recomputed(
    tied: Tied, clean: Verdict, tmp_path: Path
) -> None:
    made = rewrite(
        tied.clean["rollout"], tmp_path / "bare", points=without("router_logits", "mlp.norm")
    )
    verdict = tied.judge({"rollout": made})
    assert verdict.status == "agree"
    assert routing(verdict).flips == routing(clean).flips
    assert routing(verdict).causes["unexplained"] == 0
    assert routing(verdict).causes["near tie"] > 0


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("shown", [("router_logits",), ()], ids=["logits", "no logits"])
@pytest.mark.parametrize("fault", ["o-proj-permuted", "norm-weight"])
def test_a_router_whose_input_is_not_seen_is_not_accused(
    tied: Tied, fault: str, shown: tuple[str, ...], side: str, tmp_path: Path
) -> None:
    coarse = ("embed", "final_norm", "logprob", ".input", ".output", "expert_ids", "expert_weights")
    whole = tied.clean | {side: tied.faulty(side, tmp_path / "whole", (fault, AT))}
    made = {
        s: rewrite(whole[s], tmp_path / s, points=lambda name: name.endswith((*coarse, *shown)))
        for s in SIDES
    }
    verdict = tied.judge(made)
    (culprit,) = verdict.culprits
    assert (culprit.layer, culprit.operator, culprit.side) == (AT, None, side)
    said = " ".join(culprit.evidence)
    assert "router's doing" not in said and "not the router's logits" not in said
    told = routing(verdict)
    assert told.causes["unexplained"] == 0 and told.causes["not known"] > 0
    assert "is not known; capture mlp.norm" in said


def test_flips_of_which_nothing_is_seen_are_not_judged(
    tied: Tied, clean: Verdict, tmp_path: Path
) -> None:
    def seen(name: str) -> bool:
        return name.endswith(("expert_ids", "expert_weights", f"{LAYERS - 1}.output"))

    made = {s: rewrite(tied.clean[s], tmp_path / s, points=seen) for s in SIDES}
    told = routing(tied.judge(made))
    assert told.flips == routing(clean).flips
    assert all(one.explained is None for one in told.layers)
    assert set(told.causes.values()) == {0}


def test_layers_that_a_side_does_not_show_are_left_out(tied: Tied, tmp_path: Path) -> None:
    made = rewrite(tied.clean["trainer"], tmp_path / "part", points=without("1.mlp.expert_ids"))
    told = routing(tied.judge({"trainer": made}))
    assert [one.layer for one in told.layers] == [0, 2]
    bare = rewrite(tied.clean["trainer"], tmp_path / "none", points=without("expert_ids"))
    assert tied.judge({"trainer": bare}).routing is None
