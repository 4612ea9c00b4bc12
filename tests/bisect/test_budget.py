"""The rounding budget closes: kinds add in quadrature, and two sides too."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from layerbisect.bisect.budget import rounding_budget
from layerbisect.bisect.join import join
from layerbisect.bisect.precision import KINDS
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.bisect.verdict import RoundingBudget
from layerbisect.captures.store import Capture
from tests.bisect.conftest import Clean
from tests.bisect.making import Engine, rewrite


def budget_of(rollout: Path, trainer: Path, model: Path) -> RoundingBudget:
    first, second = Capture.open(rollout), Capture.open(trainer)
    joined = join(first, second)
    wide = "float32" in (first.info.dtype, second.info.dtype)
    compute = torch.float64 if wide else torch.float32
    reference = ReferenceModel.from_directory(model, compute)
    row = joined.chains.row
    sides = (
        Side(first, joined.chains, joined.rollout[row], compute),
        Side(second, joined.chains, joined.trainer[row], compute),
    )
    return rounding_budget(reference, sides)


@pytest.fixture(scope="module")
def budget(clean: Clean) -> RoundingBudget:
    return budget_of(clean.rollout, clean.trainer, clean.model)


def test_shares_add_in_quadrature_to_the_whole(budget: RoundingBudget) -> None:
    assert set(budget.shares) == set(KINDS) and all(v > 0 for v in budget.shares.values())
    squares = sum(share**2 for share in budget.shares.values())
    assert budget.quadrature == pytest.approx(math.sqrt(squares))
    assert budget.quadrature == pytest.approx(budget.whole, rel=0.25)
    assert budget.rows == 3 * 47


def test_the_prediction_meets_the_gap_and_the_distances(
    budget: RoundingBudget, clean: Clean
) -> None:
    # both sides round in one dtype
    assert budget.predicted_gap == pytest.approx(math.sqrt(2) * budget.whole)
    for distance in budget.distances.values():
        assert distance == pytest.approx(budget.whole, rel=0.25)
    joined = join(Capture.open(clean.rollout), Capture.open(clean.trainer))
    gap = abs(joined.score_rollout - joined.score_trainer).mean()
    assert 0.4 * budget.predicted_gap < gap < 1.3 * budget.predicted_gap


def test_a_dense_model_has_no_experts_in_its_budget(clean_llama: Clean) -> None:
    found = budget_of(clean_llama.rollout, clean_llama.trainer, clean_llama.model)
    assert found.shares["router"] == found.shares["experts"] == 0.0
    assert found.quadrature == pytest.approx(found.whole, rel=0.25)


def test_a_fault_moves_its_own_side_s_distance_alone(
    budget: RoundingBudget, clean: Clean, tmp_path: Path
) -> None:
    faulty = clean.engines["rollout"].capture(
        tmp_path / "faulty", clean.tokens, faults=[("kv-heads-regrouped", 1)]
    )
    found = budget_of(faulty, clean.trainer, clean.model)
    assert found.predicted_gap == budget.predicted_gap and found.shares == budget.shares
    assert found.distances["trainer"] == budget.distances["trainer"]
    assert found.distances["rollout"] > 5 * found.distances["trainer"]


def test_of_two_dtypes_the_narrower_makes_the_budget(clean: Clean, tmp_path: Path) -> None:
    wide = Engine.load(clean.model, "trainer", dtype="float32")
    trainer = wide.capture(tmp_path / "wide", clean.tokens)
    found = budget_of(clean.rollout, trainer, clean.model)
    assert found.predicted_gap == pytest.approx(found.whole, rel=1e-3)
    assert found.distances["trainer"] < 1e-3 * found.distances["rollout"]


def test_float32_rounds_in_its_sums_too(clean: Clean, tmp_path: Path) -> None:
    rollout, trainer = (
        Engine.load(clean.model, label, dtype="float32", attention=attention).capture(
            tmp_path / label, clean.tokens
        )
        for label, attention in (("rollout", "eager"), ("trainer", "sdpa"))
    )
    found = budget_of(rollout, trainer, clean.model)
    assert 1e-8 < found.whole < 1e-5
    assert found.quadrature == pytest.approx(found.whole, rel=0.3)
    for distance in found.distances.values():
        assert distance == pytest.approx(found.whole, rel=0.4)


def test_scores_that_are_not_there_have_no_distance(clean: Clean, tmp_path: Path) -> None:
    silent = rewrite(clean.rollout, tmp_path / "silent", logprobs=None)
    found = budget_of(silent, clean.trainer, clean.model)
    assert math.isnan(found.distances["rollout"]) and found.distances["trainer"] > 0
