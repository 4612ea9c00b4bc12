"""Filters, penalties, formats and fill are found in what was kept of a real model's scores."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bisect.scores.faults_bookkeeping import nucleus, penalised, top_k
from tests.bisect.scores.lab import Lab, Scores, before, score
from tests.bisect.scores.runs import Three, three
from tests.bisect.shapes.value_pairs import CONVICTS, Change, convicted, found, half_sure, pair


@pytest.fixture(scope="module")
def lab(small_moe_dir: Path) -> Lab:
    return Lab(small_moe_dir, "bfloat16")


@pytest.fixture(scope="module")
def run(lab: Lab) -> Three:
    return three(lab)


@pytest.mark.parametrize("share", [0.9, 0.95])
def test_top_p_and_its_p(lab: Lab, share: float) -> None:
    run = three(lab, draw=lambda logits, ids: nucleus(logits, ids, share))
    for entropy in (True, False):
        sample = pair(run, drawn=True, entropy=entropy)
        assert convicted(sample) == {"renormalised top-p/top-k"}
        summary = found(sample)["renormalised top-p/top-k"].summary
        assert summary.startswith("A looks renormalised")
        said = re.search(r"top-p (0\.\d+)", summary)
        assert said is not None and float(said[1]) == pytest.approx(share, abs=0.03)
        # the raw scores of the same tokens are sound
        assert found(pair(run, entropy=entropy)) == {}


@pytest.mark.parametrize("count", [2, 5, 20])
def test_top_k(lab: Lab, count: int) -> None:
    run = three(lab, draw=lambda logits, ids: top_k(logits, ids, count))
    sample = pair(run, drawn=True)
    assert convicted(sample) == {"renormalised top-p/top-k"}
    assert "as top-k does" in found(sample)["renormalised top-p/top-k"].summary
    # without entropies a temperature after the softmax looks the same, and nobody is convicted
    assert convicted(pair(run, drawn=True, entropy=False)) == set()


Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def lowered(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    seen = torch.zeros(logits.shape, dtype=torch.bool).scatter(1, ids, True)
    return torch.where(seen, logits - 0.5, logits)


@pytest.mark.parametrize("draw", [penalised, lowered])
def test_a_penalty_on_seen_tokens(lab: Lab, draw: Draw) -> None:
    run = three(lab, draw=draw)
    sample = pair(run, drawn=True)
    assert convicted(sample) == {"penalty on seen tokens"}
    assert found(sample)["penalty on seen tokens"].summary.startswith("A is lower than C0")
    assert found(pair(run)) == {}


FORMATS: dict[str, Change] = {
    "bf16-rounded scores": lambda scores: torch.tensor(scores).bfloat16().double().numpy(),
    "fp16-rounded scores": lambda scores: scores.astype(np.float16).astype(np.float64),
}


@pytest.mark.parametrize("test", FORMATS)
def test_a_coarse_format_and_its_column(run: Three, test: str) -> None:
    finding = found(pair(run, change=FORMATS[test]))[test]
    assert finding.side == "A"
    assert finding.false_alarm <= CONVICTS


def test_rounding_is_what_explains_the_gap_where_nothing_else_differs(run: Three) -> None:
    scores = iter(run.scores()["C0"])
    sample = pair(run, change=lambda _: FORMATS["bf16-rounded scores"](next(scores)))
    finding = found(sample)["bf16-rounded scores"]
    assert finding.explains == 1.0
    assert "100.0% of C0's scores become A's when rounded" in finding.evidence[1]


@pytest.mark.parametrize("value", [0.0, -1.0])
@pytest.mark.parametrize("count", [2, 20])
def test_fill_at_the_end_of_responses(run: Three, value: float, count: int) -> None:
    def fill(scores: Scores) -> Scores:
        scores[-count:] = value
        return scores

    sample = pair(run, change=fill)
    test = "padding filled with zeros" if value == 0 else "padding filled with a value"
    assert convicted(sample) == {test}
    finding = found(sample)[test]
    assert finding.side == "A"
    assert finding.where == f"the last {count} tokens of 8 responses"


@pytest.mark.parametrize("value", [-50.0, -1234.5, -9999.0, -1e5])
def test_fill_at_scattered_places(value: float) -> None:
    """Most of the tokens that it stands for are sure ones, of a score near 0."""
    order = iter(range(16))

    def fill(scores: Scores) -> Scores:
        number = next(order)
        if number < 10:
            scores[7 + number] = value
        return scores

    sample = pair(half_sure(3, 0.01), change=fill)
    assert convicted(sample) == {"padding filled with a value"}
    finding = found(sample)["padding filled with a value"]
    assert (finding.side, finding.tokens) == ("A", 10)


@pytest.mark.parametrize("value", [-1e3, -9999.0, -65504.0, -1e5])
@pytest.mark.parametrize("second", ["B0", "C0"])
def test_one_token_of_an_impossible_round_value(value: float, second: str) -> None:
    order = iter(range(16))

    def fill(scores: Scores) -> Scores:
        if next(order) == 0:
            scores[7] = value
        return scores

    sample = pair(half_sure(3, 0.01), change=fill, second=second)
    assert convicted(sample) == {"padding filled with a value"}
    assert found(sample)["padding filled with a value"].side == "A"


def test_one_token_of_another_impossible_value_convicts_nobody() -> None:
    """A broken forward gives such values, too."""

    def spoil(scores: Scores) -> Scores:
        scores[7:8] -= 3000.0 * float(next(order) == 0)
        return scores

    order = iter(range(16))
    assert convicted(pair(half_sure(3, 0.01), change=spoil)) == set()


@pytest.mark.parametrize("decimals", [1, 2, 3])
@pytest.mark.parametrize("noise", [0.001, 0.12])
def test_rounding_to_decimals_is_no_fill(decimals: int, noise: float) -> None:
    for seed in range(3):
        sample = pair(half_sure(seed, noise), change=lambda scores: scores.round(decimals))
        (test,) = convicted(sample)
        assert test.startswith(f"scores rounded to {decimals} decimal")
        assert found(sample)[test].side == "A"


def test_zeros_beside_rounding_to_decimals_are_fill() -> None:
    def fill(scores: Scores) -> Scores:
        changed: Scores = scores.round(2)
        changed[-8:] = 0.0
        return changed

    assert "padding filled with zeros" in convicted(pair(half_sure(3, 0.01), change=fill))


def test_fill_in_one_response(run: Three) -> None:
    unsure = min(range(8), key=lambda i: run.scores()["C0"][i][-2:].max())
    order = iter(range(8))

    def fill(scores: Scores) -> Scores:
        if next(order) == unsure:
            scores[-2:] = 0.0
        return scores

    finding = found(pair(run, change=fill))["padding filled with zeros"]
    assert finding.false_alarm <= CONVICTS


def test_tokens_that_share_an_id_are_described(lab: Lab) -> None:
    """B004: the head's last rows are lost, and their tokens alone are wrong."""

    def lose(named: dict[str, torch.Tensor]) -> None:
        named["lm_head.weight"][-8:] = 0.0

    run = three(lab)
    rows = lab.changed(lose).train(run.samples)
    wrong = iter(score(before(r, s), s.response) for r, s in zip(rows, run.samples, strict=True))
    finding = found(pair(run, change=lambda _: next(wrong)))["a few tokens against all"]
    assert re.search(r"have token ID 50\d", finding.summary)
