"""Dispatch, experts and combine of the real megatron-core, told apart where they are captured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.capture import capture
from layerbisect.captures.store import Capture
from layerbisect.loading import load_model
from layerbisect.models import make_tiny
from scripts.megatron_engine import run_job
from scripts.megatron_model import Layout
from tests.bisect.making import random_tokens, rewrite
from tests.megatron_experts import TRUTH

pytest.importorskip("megatron.core", reason="CI has megatron-core")

pytestmark = pytest.mark.slow

LAYER = 2
LARGE = (".expert_in", ".expert_out")


@dataclass(frozen=True)
class Runs:
    """Captures of one model in bfloat16: by transformers, and by Megatron with each fault."""

    model: Path
    folder: Path

    def megatron(self, fault: str, label: str = "trainer") -> Capture:
        return Capture.open(self.folder / (fault or "clean"), label=label)

    def transformers(self, label: str = "rollout") -> Capture:
        return Capture.open(self.folder / "transformers", label=label)


@pytest.fixture(
    scope="module", params=[Layout(), Layout(pipeline=2)], ids=["one rank", "pipeline of two"]
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return made(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Experts on two ranks, with the all-to-all dispatcher."""
    return made(Layout(pipeline=2, expert=2), tmp_path_factory)


def made(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    sizes: dict[str, Any] = dict(layers=4, hidden=64, heads=4, kv_heads=2, vocab=256)
    model = make_tiny(
        folder / "model", "qwen3_moe", experts=8, top_k=2, intermediate=32, head_dim=16, **sizes
    )
    tokens = random_tokens(256, [48] * 4)
    steps: list[dict[str, Any]] = [
        {
            "do": "tests.megatron_experts:forward",
            "expert_fault": f"{fault}:{LAYER}" if fault else "",
            "tokens": tokens,
            "points": ["all", "layers.*.mlp.expert_*"],
            "capture": str(folder / (fault or "clean")),
        }
        for fault in ("", *TRUTH)
    ]
    if layout.expert > 1:
        steps = [{"do": "tests.megatron_experts:alltoall", "steps": steps}]
    run_job({"model": str(model), "steps": steps}, layout)
    engine: Any = load_model(model)
    with capture(engine, folder / "transformers", points="all"), torch.no_grad():
        for ids in tokens:
            engine(input_ids=torch.tensor([ids]), use_cache=False)
    return Runs(model, folder)


def blamed(verdict: Verdict) -> list[tuple[int | None, str, str | None, str]]:
    return [(c.layer, c.point, c.operator, c.side) for c in verdict.culprits]


def place(operator: str) -> str:
    suffix = {"dispatch": "expert_in", "experts": "expert_out", "combine": "out"}[operator]
    return f"layers.{LAYER}.mlp.{suffix}"


def test_nothing_planted_is_acquitted(runs: Runs) -> None:
    verdict = bisect(runs.transformers(), runs.megatron(""), model=runs.model)
    assert (verdict.status, verdict.culprits) == ("agree", ())
    assert f"rollout: layers.{LAYER}.mlp.expert_in" in verdict.coverage.points.missing


@pytest.mark.parametrize("fault", TRUTH)
def test_dispatch_experts_and_combine_are_told_apart(runs: Runs, fault: str) -> None:
    verdict = bisect(runs.transformers(), runs.megatron(fault), model=runs.model)
    operator = TRUTH[fault]
    assert verdict.status == "divergent"
    assert blamed(verdict) == [(LAYER, place(operator), operator, "trainer")]


@pytest.mark.parametrize("fault", TRUTH)
def test_the_faulty_side_is_named_whatever_the_other_shows(runs: Runs, fault: str) -> None:
    faulty, clean = runs.megatron(fault, "rollout"), runs.megatron("", "trainer")
    verdict = bisect(faulty, clean, model=runs.model)
    operator = TRUTH[fault]
    assert blamed(verdict) == [(LAYER, place(operator), operator, "rollout")]


@pytest.mark.parametrize("fault", TRUTH)
def test_not_captured_they_are_one_operator(runs: Runs, fault: str, tmp_path: Path) -> None:
    small = rewrite(
        runs.folder / fault, tmp_path / "c", points=lambda name: not name.endswith(LARGE)
    )
    verdict = bisect(runs.transformers(), small, model=runs.model)
    assert blamed(verdict) == [(LAYER, f"layers.{LAYER}.mlp.out", "experts", "trainer")]


def test_what_was_given_to_the_wrong_expert_is_said(runs: Runs) -> None:
    verdict = bisect(runs.transformers(), runs.megatron("inputs-swapped"), model=runs.model)
    (culprit,) = verdict.culprits
    said = " ".join(culprit.evidence)
    assert re.search(r"2 of \d+ slots hold another input .* 2 of them another row's", said)


def test_an_expert_is_named(runs: Runs) -> None:
    verdict = bisect(runs.transformers(), runs.megatron("down-row-scaled"), model=runs.model)
    (culprit,) = verdict.culprits
    assert culprit.where == "tokens routed to expert 3"


def test_spread_over_ranks_nothing_planted_is_acquitted(spread: Runs) -> None:
    verdict = bisect(spread.transformers(), spread.megatron(""), model=spread.model)
    assert (verdict.status, verdict.culprits) == ("agree", ())


@pytest.mark.parametrize("fault", TRUTH)
def test_spread_over_ranks_combine_is_told_from_what_was_before_it(
    spread: Runs, fault: str
) -> None:
    verdict = bisect(spread.transformers(), spread.megatron(fault), model=spread.model)
    (culprit,) = verdict.culprits
    assert (culprit.layer, culprit.side) == (LAYER, "trainer")
    if TRUTH[fault] == "combine":
        assert (culprit.point, culprit.operator) == (place("combine"), "combine")
    else:
        # what other ranks' experts were given is not seen
        assert (culprit.point, culprit.operator) == (place("experts"), None)
        assert any("any of dispatch, experts" in line for line in culprit.evidence)
