"""Catalogue faults are classed from scores and weights alone, and sound runs raise nothing."""

import re
from pathlib import Path

import numpy as np
import pytest

from layerbisect.bisect.scores.conclude import DECODE
from layerbisect.bisect.scores.decision_map import CHANCE, PATHS, SIDES
from layerbisect.bisect.scores.judge import judge
from layerbisect.bisect.shapes.table import SPREAD
from layerbisect.bisect.verdict import Verdict
from layerbisect.bisect.weight_diff.compare import compare
from layerbisect.captures.errors import RecordError
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.weights.snapshot import save_weights
from tests.bisect.scores.cases import CONTROLS, FAULTS, clean
from tests.bisect.scores.faults_bookkeeping import stale_prompt_scores
from tests.bisect.scores.faults_weights import WRONG
from tests.bisect.scores.lab import before, score
from tests.bisect.scores.runs import Bench, Case, Family


@pytest.fixture(scope="module")
def bench(small_qwen3_dir: Path, small_moe_dir: Path) -> Bench:
    return Bench(small_qwen3_dir, small_moe_dir)


def _mae(record: ScoreRecord, first: str, second: str) -> float:
    apart = [call.scores[first] - call.scores[second] for call in record]
    return float(np.abs(np.concatenate(apart)).mean())


def test_sound_engines_differ_by_rounding_and_repeat_to_the_bit(bench: Bench) -> None:
    record = clean(bench)
    gaps = [_mae(record, *pair) for pair in (("A", "B0"), ("B0", "C0"), ("A", "C0"))]
    assert all(0.001 < gap < 0.01 for gap in gaps)
    # computed anew, and not the copies that stand in the record
    run, lab = bench.sound(), bench.lab()
    for column, again in (("B1", lab.prefill(run.samples)), ("C1", lab.train(run.samples))):
        for call, sample, rows in zip(record, run.samples, again, strict=True):
            assert np.array_equal(call.scores[column], score(before(rows, sample), sample.response))
    entropies = np.concatenate([call.scores["C0.entropy"] for call in record])
    assert np.quantile(entropies, 0.1) < 0.3 and np.quantile(entropies, 0.9) > 2.5


def test_enough_of_the_catalogue_is_planted() -> None:
    planted = {case.catalogue for case in FAULTS.values()} - {""}
    assert len(planted) >= 26
    assert len(CONTROLS) >= 20


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_classed(bench: Bench, name: str) -> None:
    case = FAULTS[name]
    if case.refused:
        with pytest.raises(RecordError, match=case.refused):
            case.plant(bench)
        return
    verdict = judge(case.plant(bench), tolerance=case.tolerance)
    assert verdict.status == "divergent"
    if case.shapes and (verdict.culprits or not case.faint):
        _check_shape(case, verdict)
    elif case.letter == "C":
        _check_trainer(case, verdict)
    else:
        _check_path(case, verdict)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_are_classed_by_their_tensors(
    bench: Bench, name: str, tmp_path: Path
) -> None:
    """What scores leave open, weights or model, the weights settle."""
    wrong = WRONG[name]
    sides = zip(("rollout", "trainer"), wrong.labs(bench), strict=True)
    held = [save_weights(lab.model, tmp_path / side, label=side) for side, lab in sides]
    report = compare(*held)
    assert report.status == "divergent"
    assert {finding.kind for finding in report.findings} == {wrong.kind}


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_equal_weights_agree(bench: Bench, family: Family, tmp_path: Path) -> None:
    model = bench.lab(family).model
    held = [save_weights(model, tmp_path / side, label=side) for side in ("rollout", "trainer")]
    assert compare(*held).status == "agree"


def _check_shape(case: Case, verdict: Verdict) -> None:
    """The one culprit is a shape that the fault has."""
    (culprit,) = verdict.culprits
    if case.weights:
        assert culprit.operator == "weights" and culprit.side == case.side
        return
    # where C is apart in some places, A and B may be so alike
    alike = case.letter == "C" and culprit.operator is None
    assert culprit.side == ("unknown" if alike else case.side)
    said = culprit.evidence[0]
    assert said.startswith(tuple(f"{shape}: " for shape in case.shapes)), said
    assert PATHS[case.letter] in culprit.where
    assert re.search(case.where, culprit.where)


def _check_trainer(case: Case, verdict: Verdict) -> None:
    """C is apart and has no shape: weights, the model, or what it saw; nobody is blamed."""
    assert not verdict.culprits
    assert any("weights" in reason and reason.startswith("C differs") for reason in verdict.reasons)


def _check_path(case: Case, verdict: Verdict) -> None:
    """A or B is apart and has no shape: its computation is named, and no operator.

    It is convicted where decode's rounding makes no such gap, and only pointed at below that.
    """
    assert verdict.scores is not None
    if min(p.gap.mae for p in verdict.scores.pairs if case.letter in p.name) <= DECODE:
        assert not verdict.culprits
        pointed = f"{PATHS[case.letter]} differs from both others"
        assert any(reason.startswith(pointed) for reason in verdict.reasons)
        return
    (culprit,) = verdict.culprits
    assert culprit.side == SIDES[case.letter]
    assert culprit.operator is None
    assert PATHS[case.letter] in culprit.where


@pytest.mark.parametrize("name", CONTROLS)
def test_a_sound_run_raises_nothing(bench: Bench, name: str) -> None:
    control = CONTROLS[name]
    verdict = judge(control.make(bench), tolerance=control.tolerance)
    assert verdict.status == "agree", verdict.reasons
    assert not verdict.culprits
    assert verdict.scores is not None
    convicting = [
        finding
        for finding in verdict.scores.findings
        if finding.false_alarm <= CHANCE and finding.test not in SPREAD
    ]
    assert not convicting


def test_stale_buffers_that_change_are_unstable(bench: Bench) -> None:
    verdict = judge(stale_prompt_scores(bench, again=False))
    assert verdict.status == "unstable"
    assert any("repeats of B differ" in reason for reason in verdict.reasons)
