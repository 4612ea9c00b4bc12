"""Offsets, temperatures and other scales are found in a real small model's scores, with their size.

A and C are two engines' scores of 8 x 128 tokens, apart by their own rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.bisect.scores.lab import Lab, Scores
from tests.bisect.scores.runs import Three, three
from tests.bisect.shapes.value_pairs import (
    CONVICTS,
    Change,
    convicted,
    found,
    from_place,
    half_sure,
    pair,
)


@pytest.fixture(scope="module")
def run(small_qwen3_dir: Path) -> Three:
    return three(Lab(small_qwen3_dir, "bfloat16"))


@pytest.mark.parametrize("entropy", [True, False])
def test_nothing_in_a_clean_pair(run: Three, entropy: bool) -> None:
    assert found(pair(run, entropy=entropy)) == {}


@pytest.mark.parametrize("place", [0, 1, 50])
@pytest.mark.parametrize("offset", [-0.10, 0.05, -0.02])
def test_an_offset_and_where_it_begins(run: Three, offset: float, place: int) -> None:
    finding = found(pair(run, change=from_place(offset, place)))["constant offset"]
    lower, higher = ("A", "C0") if offset < 0 else ("C0", "A")
    assert f"{lower} is lower than {higher} by {abs(offset):.3f}"[:-1] in finding.summary
    # 8 tokens at position 0 cannot be told from noise of the offset's size
    if abs(offset) > 0.02 or place != 1:
        assert finding.where == (f"response positions >= {place}" if place else "")
    assert finding.false_alarm <= CONVICTS
    assert finding.explains > {0.1: 0.75, 0.05: 0.55, 0.02: 0.25}[abs(offset)]
    assert finding.side is None


@pytest.mark.parametrize("offset", [0.002, -0.002])
def test_a_common_bias_of_two_engines_is_no_offset(run: Three, offset: float) -> None:
    def shift(scores: Scores) -> Scores:
        return np.minimum(scores + offset, 0.0)

    assert found(pair(run, change=shift)) == {}


def test_huge_outliers_hide_no_offset_and_make_none(run: Three) -> None:
    def spoil(scores: Scores) -> Scores:
        scores[::40] -= 8.0
        return scores

    assert "constant offset" not in found(pair(run, change=spoil))
    both = found(pair(run, change=lambda scores: spoil(scores) - 0.1))
    assert "A is lower than C0 by 0.100" in both["constant offset"].summary


@pytest.mark.parametrize("heat", [0.6, 0.7, 0.8, 0.9, 1.2])
def test_a_temperature_is_fitted_from_entropies(run: Three, heat: float) -> None:
    sample = pair(run, c=heat)
    finding = found(sample)["temperature"]
    assert convicted(sample) == {"temperature"}
    divided = min(heat, 1 / heat)
    column = "C0" if heat < 1 else "A"
    values = [divided - 0.01, divided, divided + 0.01]
    assert any(f"{column} is of logits divided by {v:.2f}" in finding.summary for v in values)


@pytest.mark.parametrize("heat", [0.6, 0.8, 0.9])
def test_a_temperature_is_estimated_from_scores_alone(run: Three, heat: float) -> None:
    sample = pair(run, a=heat, entropy=False)
    assert convicted(sample) == {"temperature"}
    summary = found(sample)["temperature"].summary
    assert summary.startswith("A is of logits divided by about ")
    assert float(summary.split()[7]) == pytest.approx(heat, abs=0.04)


@pytest.mark.parametrize("heat", [0.7, 0.9, 1.2])
@pytest.mark.parametrize("noise", [0.005, 0.05])
@pytest.mark.parametrize("second", ["B0", "C0"])
def test_a_temperature_between_noisy_engines_of_a_peaked_model(
    heat: float, noise: float, second: str
) -> None:
    run = half_sure(1, noise)
    for entropy in (True, False):
        sample = pair(run, a=heat, entropy=entropy, second=second)
        assert convicted(sample) == {"temperature"}


@pytest.mark.parametrize(("second", "told"), [("B0", {"temperature"}), ("C0", set())])
def test_without_a_third_column_only_shared_weights_tell_a_temperature_from_an_update(
    second: str, told: set[str]
) -> None:
    sample = pair(half_sure(1, 0.05), a=0.9, entropy=False, second=second)
    assert convicted(replace(sample, natural=math.nan)) == told


@pytest.mark.parametrize("heat", [0.95, 1.05])
def test_a_round_temperature_near_1(heat: float) -> None:
    assert convicted(pair(half_sure(1, 0.005), a=heat)) == {"temperature"}


@pytest.mark.parametrize("heat", [0.6, 0.9, 1.2])
@pytest.mark.parametrize("entropy", [True, False])
def test_divided_logprobs_are_no_temperature(run: Three, heat: float, entropy: bool) -> None:
    sample = pair(run, change=lambda scores: scores / heat, entropy=entropy)
    assert convicted(sample) == {"log-probs divided by T"}
    assert (
        f"divided by {min(heat, 1 / heat):.2f}"[:-1]
        in found(sample)["log-probs divided by T"].summary
    )


@pytest.mark.parametrize("heat", [0.7, 0.9, 1.2])
def test_divided_logprobs_beside_scaled_logits(run: Three, heat: float) -> None:
    sample = pair(run, c=heat, change=lambda scores: scores / heat)
    assert convicted(sample) == {"log-probs divided by T"}
    summary = found(sample)["log-probs divided by T"].summary
    assert summary.startswith("A is a log-prob divided by about")
    assert float(summary.split()[7].strip(",")) == pytest.approx(heat, abs=0.06)


SCALES: dict[str, Change] = {
    "negative": np.negative,
    "base-2": lambda scores: scores / math.log(2),
    "base-10": lambda scores: scores / math.log(10),
    "exponential": np.exp,
    "running sums": np.cumsum,
}


@pytest.mark.parametrize("scale", SCALES)
def test_another_scale_is_named_with_its_column(run: Three, scale: str) -> None:
    sample = pair(run, change=SCALES[scale])
    assert convicted(sample) == {"scores of another scale"}
    finding = found(sample)["scores of another scale"]
    assert scale in finding.summary and finding.side == "A"


@pytest.mark.parametrize("value", [-50.0, -1e5, -1e6])
def test_one_token_makes_no_other_scale(run: Three, value: float) -> None:
    order = iter(range(8))

    def spoil(scores: Scores) -> Scores:
        if next(order) == 0:
            scores[7] = value
        return scores

    assert "scores of another scale" not in found(pair(run, change=spoil))


def test_a_score_above_zero_is_no_logprob(run: Three) -> None:
    def raise_some(scores: Scores) -> Scores:
        scores[7] = 0.3
        return scores

    finding = found(pair(run, change=raise_some))["positive log-probs"]
    assert (finding.side, finding.tokens) == ("A", 8)
