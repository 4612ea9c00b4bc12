"""How much of a gap routing makes: the trainer captured with the rollout's routes forced on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from layerbisect.bisect.routing_split import split_gap
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from tests.bisect.making import rewrite
from tests.bisect.tied_routers import Tied


@pytest.fixture(scope="module")
def forced(tied: Tied, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("forced")
    return {
        "forced": tied.forced(folder / "routes", weights=False),
        "forced with weights": tied.forced(folder / "weights", weights=True),
    }


def split(tied: Tied, *others: Path, trainer: Path | None = None) -> Any:
    captures = [Capture.open(one) for one in others]
    own = Capture.open(trainer or tied.clean["trainer"])
    return split_gap(Capture.open(tied.clean["rollout"]), own, captures)


def gap(first: Path, second: Path) -> float:
    a, b = (Capture.open(one).scores.logprob for one in (first, second))
    return float(np.abs(a - b).mean())


def test_the_parts_are_the_gaps_differences(tied: Tied, forced: dict[str, Path]) -> None:
    verdict = tied.judge(forced=list(forced.values()))
    assert verdict.routing is not None and verdict.routing.split is not None
    found = verdict.routing.split
    rollout = tied.clean["rollout"]
    assert found.tokens == len(Capture.open(rollout).scores.logprob)
    assert verdict.gap is not None and found.own == pytest.approx(verdict.gap.mae)
    assert found.forced == pytest.approx(gap(rollout, forced["forced"]))
    assert found.forced_with_weights == pytest.approx(gap(rollout, forced["forced with weights"]))
    assert list(found.parts) == ["routes", "weights", "rest"]
    assert sum(found.parts.values()) == pytest.approx(found.own)
    # in a model that flips at near ties, routes make the most of it
    assert found.parts["routes"] > 0.2 * found.own
    assert abs(found.parts["weights"]) < found.parts["routes"]


def test_one_forced_capture_alone(tied: Tied, forced: dict[str, Path]) -> None:
    some = split(tied, forced["forced"])
    assert list(some.parts) == ["routes", "rest"] and some.forced_with_weights is None
    more = split(tied, forced["forced with weights"])
    assert list(more.parts) == ["routes and weights", "rest"] and more.forced is None
    for one in (some, more):
        assert sum(one.parts.values()) == pytest.approx(one.own)
    assert split(tied, *forced.values()) == split(tied, *reversed(forced.values()))


def test_weights_that_are_wrong_are_a_part_of_their_own(
    tied: Tied, forced: dict[str, Path], tmp_path: Path
) -> None:
    wrong = [("top-k-not-renormalised", 1)]
    trainer = tied.faulty("trainer", tmp_path / "trainer", *wrong)
    routes = tied.forced(tmp_path / "routes", weights=False, faults=wrong)
    weights = tied.forced(tmp_path / "weights", weights=True, faults=wrong)
    found = split(tied, routes, weights, trainer=trainer)
    assert found.parts["weights"] > 0.4 * found.own
    assert found.parts["weights"] > 2 * abs(found.parts["routes"])
    # forced weights leave nothing of the fault
    assert found.parts["rest"] == pytest.approx(
        gap(tied.clean["rollout"], forced["forced with weights"])
    )


def test_the_split_needs_no_points(tied: Tied, forced: dict[str, Path], tmp_path: Path) -> None:
    bare = rewrite(forced["forced"], tmp_path / "bare", points=lambda name: name == "embed")
    found = split(tied, bare)
    # but nothing then shows that the weights are the trainer's
    assert "is not checked" in found.unchecked[0] and "\n" not in found.unchecked[0]
    assert dataclasses.replace(found, unchecked=()) == split(tied, forced["forced"])
    assert split(tied, *forced.values()).unchecked == ()


# --- a forced capture as a side


@pytest.mark.parametrize("kind", ["forced", "forced with weights"])
def test_what_was_forced_is_not_judged(tied: Tied, forced: dict[str, Path], kind: str) -> None:
    verdict = tied.judge({"trainer": forced[kind]})
    assert verdict.status == "agree" and not verdict.culprits
    assert verdict.routing is not None
    assert verdict.routing.forced == ("trainer",) and verdict.routing.flips == 0
    assert any("was given its routes" in note for note in verdict.coverage.notes)


@pytest.mark.parametrize("kind", ["forced", "forced with weights"])
@pytest.mark.parametrize(
    ("fault", "operator"), [("experts-swapped", "experts"), ("router-low-precision", "router")]
)
def test_faults_of_a_forced_side_are_found(
    tied: Tied, kind: str, fault: str, operator: str, tmp_path: Path
) -> None:
    made = tied.forced(tmp_path / "made", weights="weights" in kind, faults=[(fault, 1)])
    (culprit,) = tied.judge({"trainer": made}).culprits
    assert (culprit.layer, culprit.operator, culprit.side) == (1, operator, "trainer")
    assert not culprit.point.endswith("expert_ids")


def far_from_its_own(
    logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # without the best, and not renormalised
    other = logits.float().topk(ids.shape[1] + 1).indices[:, 1:]
    return logits.float().softmax(-1).gather(1, other).to(weights.dtype), other


@pytest.mark.parametrize("kind", ["forced", "forced with weights"])
@pytest.mark.parametrize(
    "hidden",
    [(), ("expert_ids",), ("expert_weights",), ("expert_ids", "mlp.out")],
    ids=lambda names: " and ".join(names) or "nothing",
)
def test_routes_that_no_router_would_choose_accuse_none_on_whom_they_were_forced(
    tied: Tied, kind: str, hidden: tuple[str, ...], tmp_path: Path
) -> None:
    rollout = tied.choosing("rollout", tmp_path / "rollout", 1, far_from_its_own)
    whole = tied.forced(tmp_path / "whole", weights="weights" in kind, routes=rollout)
    made = rewrite(whole, tmp_path / "made", points=lambda name: not name.endswith(hidden))
    verdict = tied.judge({"rollout": rollout, "trainer": made})
    assert {(c.operator, c.side) for c in verdict.culprits} == {("router", "rollout")}


# --- what is refused


def changed(**info: Any) -> Callable[[Path, Path], Path]:
    return lambda source, target: rewrite(source, target, info=info)


def other_fingerprint(source: Path, target: Path) -> Path:
    prints = dict(Capture.open(source).info.fingerprints)
    prints["model.norm.weight"] = "0" * 16
    return rewrite(source, target, info={"fingerprints": prints})


def other_experts(source: Path, target: Path) -> Path:
    def change(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if name == "layers.2.mlp.expert_ids":
            values[7] = (values[7] + 1) % 16
        return values

    return rewrite(source, target, change=change)


def other_attention(source: Path, target: Path) -> Path:
    def change(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if name == "layers.0.attn.out":
            values[7] *= 1 + 2**-7
        return values

    return rewrite(source, target, change=change)


def other_expert_weights(source: Path, target: Path) -> Path:
    def change(name: str, values: NDArray[Any]) -> NDArray[Any]:
        return values * np.float32(1.1) if name == "layers.0.mlp.out" else values

    return rewrite(source, target, change=change)


def fewer_tokens(source: Path, target: Path) -> Path:
    return rewrite(source, target, rows=Capture.open(source).rows.sequence < 3)


def other_tokens(source: Path, target: Path) -> Path:
    return rewrite(source, target, tokens=lambda tokens: tokens ^ 1)


def no_log_prob(source: Path, target: Path) -> Path:
    return rewrite(source, target, logprobs=lambda values: np.full_like(values, -np.inf))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (changed(routes="own"), "was captured with the model's own routes"),
        (changed(label="actor"), "its label is 'actor' and not 'trainer'"),
        (changed(engine="megatron"), "its engine is 'megatron' and not 'transformers'"),
        (changed(weight_version="7"), "its weight version is '7' and not None"),
        (other_fingerprint, "ran other weights than .* 1 of .* differ, such as model.norm.weight"),
        (other_experts, "used other experts than .* chose in 1 of 192 rows of layer 2"),
        (other_attention, "another state than .*: layers.0.attn.out differs in 1 of 192 rows"),
        (other_expert_weights, "another state than .*: layers.0.mlp.out differs in "),
        (fewer_tokens, "lacks the log-probs of 47 of the 188 tokens"),
        (other_tokens, "different tokens at position"),
        (no_log_prob, "no token has a finite log-prob"),
    ],
)
def test_other_captures_are_refused(
    tied: Tied,
    forced: dict[str, Path],
    make: Callable[[Path, Path], Path],
    said: str,
    tmp_path: Path,
) -> None:
    made = make(forced["forced"], tmp_path / "made")
    with pytest.raises(LayerBisectError, match=said) as refused:
        tied.judge(forced=[made])
    assert "\n" not in str(refused.value)


def test_two_of_a_kind_and_a_forced_trainer_are_refused(
    tied: Tied, forced: dict[str, Path]
) -> None:
    one, other = forced.values()
    with pytest.raises(LayerBisectError, match="both captured with routes forced"):
        split(tied, one, one)
    with pytest.raises(LayerBisectError, match="has routes that were forced"):
        split(tied, other, trainer=one)
