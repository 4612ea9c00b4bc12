"""JUnit XML: it parses, its counts are right, and it fails where the result does."""

from __future__ import annotations

import dataclasses
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from layerbisect.accuracy_summary import AccuracySummary, Miss, group
from layerbisect.bisect.scores.report import PairReport, ScoreReport
from layerbisect.bisect.verdict import Culprit, Gap, RuledOut, Status, Verdict
from layerbisect.report.junit import junit_xml
from layerbisect.report.results import (
    AccuracyResult,
    ReplayResult,
    Result,
    SelfTestResult,
    VerdictResult,
)
from layerbisect.wording import visible
from tests.layerbisect.report.test_selftest import ACCUSED, AGREE, DROPPED, GUILTY, said_of
from tests.layerbisect.test_cli_replay import errors, ran, replay_of

COLUMN = Culprit(
    None, "logprob", "logprob", "rollout", 0.9, 9.0, 1.0, "positions >= 1", ("A is lower",)
)


def gap(mae: float) -> Gap:
    return Gap(mae, mae, mae, mae, mae, 100)


def scored(status: Status, *culprits: Culprit, **maes: float) -> Verdict:
    pairs = tuple(
        PairReport(
            name.replace("_", "-"),
            name.partition("_")[0],
            name.partition("_")[2],
            gap(mae),
            None,
            None,
            (),
            (),
        )
        for name, mae in maes.items()
    )
    report = ScoreReport(0.01, 4, 100, pairs, (), {}, None, None, (), (), 4)
    return dataclasses.replace(
        AGREE, status=status, culprits=culprits, scores=report, reasons=("said why",)
    )


def suites(*results: Result) -> list[Element]:
    root = ElementTree.fromstring(junit_xml(results))
    assert root.tag == "testsuites"
    found = list(root)
    for name in ("tests", "failures", "errors"):
        assert int(root.attrib[name]) == sum(int(suite.attrib[name]) for suite in found)
    for suite in found:
        cases = suite.findall("testcase")
        assert len(cases) == int(suite.attrib["tests"]) == len(list(suite)) > 0
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.attrib[name]) == len(suite.findall(f"testcase/{tag}"))
        for case in cases:
            assert case.attrib["name"] and case.attrib["classname"].startswith("layerbisect.")
            assert float(case.attrib["time"]) >= 0 and len(list(case)) <= 1
    return found


def outcomes(suite: Element) -> dict[str, str]:
    return {case.attrib["name"]: _outcome(case) for case in suite.findall("testcase")}


def _outcome(case: Element) -> str:
    return case[0].tag if len(case) and case[0].tag != "system-out" else "passed"


def told(suite: Element, name: str) -> Element:
    (found,) = (case[0] for case in suite.findall("testcase") if case.attrib["name"] == name)
    return found


def test_a_bisection_asks_whether_it_is_rounding_and_names_each_culprit() -> None:
    other = dataclasses.replace(GUILTY, layer=2, point="layers.2.attn.q", operator="rope")
    verdict = dataclasses.replace(
        ACCUSED,
        culprits=(dataclasses.replace(GUILTY, evidence=("it lacks a part",)), other),
        ruled_out=(RuledOut("trainer runs other weights", "all match"),),
        next="`layerbisect replay x`",
    )
    (suite,) = suites(VerdictResult("case", verdict))
    assert outcomes(suite) == {
        "the gap is rounding": "failure",
        "layers.1.mid (residual) on the trainer side": "failure",
        "layers.2.attn.q (rope) on the trainer side": "failure",
        "ruled out: trainer runs other weights": "passed",
    }
    first = told(suite, "layers.1.mid (residual) on the trainer side")
    assert first.attrib["message"] == (
        "layers.1.mid (residual) on the trainer side makes 80 % of the gap; own error 9.0x "
        "rounding (floor 1.1x)"
    )
    assert first.text is not None
    assert "it lacks a part\nnext: `layerbisect replay x`" in first.text
    second = told(suite, "layers.2.attn.q (rope) on the trainer side")
    assert second.attrib["message"].startswith("layers.2.attn.q (rope) on the trainer side makes")


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("agree", "passed"),
        ("divergent", "failure"),
        ("unstable", "error"),
        ("inconclusive", "error"),
    ],
)
def test_what_could_not_be_judged_is_an_error_and_no_failure(status: Status, outcome: str) -> None:
    (suite,) = suites(VerdictResult("case", dataclasses.replace(AGREE, status=status)))
    assert outcomes(suite) == {"the gap is rounding": outcome}
    assert "no reason" in "".join(suite.itertext()) + str(suite[0][0].attrib)


def test_scores_ask_of_each_pair_whether_it_is_within_the_tolerance() -> None:
    verdict = scored("divergent", COLUMN, A_B0=0.1, B0_C0=0.006, A_C0=0.1)
    (suite,) = suites(VerdictResult("scores", verdict))
    assert outcomes(suite) == {
        "the gap is rounding": "failure",
        "logprob (logprob) on the rollout side": "failure",
        "A-B0 is within the tolerance": "failure",
        "B0-C0 is within the tolerance": "passed",
        "A-C0 is within the tolerance": "failure",
    }
    message = told(suite, "A-B0 is within the tolerance").attrib["message"]
    assert message.startswith("mean absolute difference 0.1000 nat, tolerance 0.0100; mean 0.1000")
    (open_,) = suites(VerdictResult("scores", scored("inconclusive", A_B0=0.1)))
    assert outcomes(open_)["A-B0 is within the tolerance"] == "skipped"


def test_a_replay_asks_of_each_stretch_and_implementation() -> None:
    result = ReplayResult("replay", (replay_of(),), {"layers.9.mlp.out": "not captured"})
    (suite,) = suites(result)
    found = outcomes(suite)
    assert found["layers.9.attn.context (attention)"] == "failure"
    assert found["layers.9.attn.context: triton-fast"] == "passed"
    # what others do wrong is said, and is not what the engine is held to
    assert found["layers.9.attn.context: wrong"] == "skipped"
    assert found["layers.9.attn.context: bad"] == found["layers.9.attn.context: aiter"] == "skipped"
    assert found["layers.9.mlp.out is replayed"] == "skipped"
    assert "beyond rounding" in told(suite, "layers.9.attn.context: wrong").attrib["message"]
    why = told(suite, "layers.9.attn.context: aiter").attrib["message"]
    assert why == "unavailable: the package is not installed"


def test_implementations_are_judged_where_the_engine_s_output_is_not_known() -> None:
    unknown = replay_of(engine=None, conclusion="implementations alone are judged: wrong errs")
    (suite,) = suites(ReplayResult("replay", (unknown,), {}))
    assert outcomes(suite)["layers.9.attn.context: wrong"] == "failure"


def test_accuracy_has_a_case_a_group_and_none_of_them_fails() -> None:
    summary = AccuracySummary(
        "20 cases", (group("tuned on", 19, 20, "kind"),), (Miss("m", "a norm", "agree"),)
    )
    (suite,) = suites(AccuracyResult("accuracy", summary))
    assert set(outcomes(suite).values()) == {"passed"}
    text = "".join(suite.itertext())
    assert "19 of 20 right, 95 % interval 76.4% to 99.1%" in text
    assert "m: planted a norm, named agree" in text


def test_a_self_test_has_a_case_a_fault() -> None:
    (suite,) = suites(SelfTestResult("t", said_of((AGREE, None), (AGREE, DROPPED))))
    assert outcomes(suite) == {
        "the clean pair is not accused": "passed",
        "residual-dropped: residual, layer 1, trainer": "failure",
        "experts-swapped": "skipped",
    }
    assert suite.attrib["time"] == "2.500"
    missed = told(suite, "residual-dropped: residual, layer 1, trainer")
    assert "nobody is convicted" in str(missed.text)


def every_result() -> list[Result]:
    innocent = replay_of(engine=errors(), status="acquitted", results=(ran("torch"),))
    unknown = replay_of(engine=None, status="inconclusive", conclusion="few", results=())
    summary = AccuracySummary("20 cases", (group("x", 1, 2),), ())
    statuses: tuple[Status, ...] = ("agree", "divergent", "unstable", "inconclusive")
    return [
        *(VerdictResult(s, dataclasses.replace(AGREE, status=s)) for s in statuses),
        VerdictResult("weak", dataclasses.replace(ACCUSED, status="inconclusive")),
        *(VerdictResult(f"s {s}", scored(s, A_B0=0.5, B0_C0=0.001)) for s in statuses),
        ReplayResult("guilty", (replay_of(), unknown), {}),
        ReplayResult("innocent", (innocent,), {"a": "b"}),
        ReplayResult("unknown", (innocent, unknown), {}),
        ReplayResult("nothing", (), {"a": "b"}),
        AccuracyResult("accuracy", summary),
        SelfTestResult("passed", said_of((AGREE, None), (ACCUSED, DROPPED))),
        SelfTestResult("failed", said_of((ACCUSED, None), (ACCUSED, DROPPED))),
    ]


@pytest.mark.parametrize("result", every_result(), ids=lambda result: result.name)
def test_a_suite_fails_where_the_exit_code_says_so(result: Result) -> None:
    (suite,) = suites(result)
    failures, errors_ = (int(suite.attrib[name]) for name in ("failures", "errors"))
    assert (failures > 0, errors_ > 0) == (result.exit_code == 1, result.exit_code == 2)


def test_results_are_suites_in_their_order() -> None:
    names = [suite.attrib["name"] for suite in suites(*every_result())]
    assert names == [result.name for result in every_result()]


BAD = "\x00\x1b[31m\x7f\x85\ud800\ufffe\u202e\u2028\r]]>&<b a='\">"


def test_what_xml_cannot_hold_is_a_visible_escape() -> None:
    assert visible("a\tb\nc") == "a\tb\nc" and visible("\N{GRINNING FACE} é 中") == "😀 é 中"
    assert visible(BAD) == ("\\x00\\x1b[31m\\x7f\\x85\\ud800\\ufffe\\u202e\\u2028\\r]]>&<b a='\">")
    guilty = dataclasses.replace(GUILTY, point=f"p{BAD}", evidence=(BAD,), where=BAD)
    verdict: dict[str, Any] = {"culprits": (guilty,), "reasons": (BAD,), "next": BAD}
    (suite,) = suites(VerdictResult(f"n{BAD}", dataclasses.replace(ACCUSED, **verdict)))
    assert suite.attrib["name"] == f"n{visible(BAD)}"
    assert visible(BAD) in "".join(suite.itertext())
    assert f"p{visible(BAD)} (residual) on the trainer side" in outcomes(suite)
