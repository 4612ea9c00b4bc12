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
from tests.bisect.shapes.value_pairs import CONVICTS, Change, convicted, found, pair


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
    assert "100.0% of the differences are within half a unit" in finding.evidence[1]


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
