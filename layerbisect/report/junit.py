"""JUnit XML for CI: a suite a result, and in it a case for each question that was answered.

A suite fails where its result's exit code is 1, and has an error where it is 2, so that a page of
CI and the command never disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from xml.etree import ElementTree

from layerbisect.bisect.verdict import Culprit, Verdict
from layerbisect.kernels.replay.report import Replay
from layerbisect.kernels.replay.report import Result as Ran
from layerbisect.replay_words import figures, finding
from layerbisect.report.results import (
    AccuracyResult,
    ReplayResult,
    Result,
    SelfTestResult,
    VerdictResult,
)
from layerbisect.report.selftest import named_words, planted_words
from layerbisect.report.summary import sentence
from layerbisect.terminal.replay import notes
from layerbisect.terminal.selftest import left_out_words
from layerbisect.terminal.verdict import side_words
from layerbisect.wording import nat, times, visible

Outcome = Literal["passed", "failure", "error", "skipped"]


@dataclass(frozen=True, slots=True)
class Case:
    """A question and its answer; ``message`` says it in a sentence, ``body`` with all evidence."""

    name: str
    outcome: Outcome
    message: str = ""
    body: str = ""
    seconds: float = 0.0


def junit_xml(results: Sequence[Result]) -> bytes:
    """Return the results as one JUnit XML document in UTF-8."""
    root = ElementTree.Element("testsuites")
    everything: list[Case] = []
    for result in results:
        kind, cases = _cases(result)
        everything += cases
        suite = ElementTree.SubElement(root, "testsuite", _counted(cases, visible(result.name)))
        for one in cases:
            _add(suite, one, f"layerbisect.{kind}.{visible(result.name)}")
    root.attrib |= _counted(everything, "layerbisect")
    # schemas have it of a suite alone
    del root.attrib["skipped"]
    ElementTree.indent(root)
    written: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


def _counted(cases: Sequence[Case], name: str) -> dict[str, str]:
    found = [one.outcome for one in cases]
    return {
        "name": name,
        "tests": str(len(cases)),
        "failures": str(found.count("failure")),
        "errors": str(found.count("error")),
        "skipped": str(found.count("skipped")),
        "time": f"{sum(one.seconds for one in cases):.3f}",
    }


def _add(suite: ElementTree.Element, case: Case, classname: str) -> None:
    attributes = {"classname": classname, "name": visible(case.name)}
    element = ElementTree.SubElement(suite, "testcase", attributes, time=f"{case.seconds:.3f}")
    if case.outcome == "passed":
        said = "\n".join(part for part in (case.message, case.body) if part)
        if said:
            ElementTree.SubElement(element, "system-out").text = visible(said)
        return
    told = ElementTree.SubElement(element, case.outcome, message=visible(case.message))
    if case.outcome != "skipped":
        told.set("type", case.outcome)
    if case.body:
        told.text = visible(case.body)


def _cases(result: Result) -> tuple[str, list[Case]]:
    if isinstance(result, VerdictResult):
        return ("scores" if result.verdict.of_scores else "bisect"), list(_of_verdict(result))
    if isinstance(result, ReplayResult):
        return "replay", list(_of_replays(result))
    if isinstance(result, AccuracyResult):
        return "accuracy", list(_of_accuracy(result))
    return "selftest", list(_of_selftest(result))


def _of_verdict(result: VerdictResult) -> Iterator[Case]:
    verdict = result.verdict
    yield Case("the gap is rounding", _OUTCOMES[result.status], sentence(result), _why(verdict))
    for culprit in verdict.culprits:
        alone = replace(result, verdict=replace(verdict, culprits=(culprit,)))
        yield Case(_accused(culprit), _blamed(result), sentence(alone), _evidence(verdict, culprit))
    for out in verdict.ruled_out:
        yield Case(f"ruled out: {out.hypothesis}", "passed", out.evidence)
    if result.verdict.of_scores:
        yield from _pairs(result)


_OUTCOMES: dict[str, Outcome] = {
    "agree": "passed",
    "divergent": "failure",
    "unstable": "error",
    "inconclusive": "error",
}


def _blamed(result: VerdictResult) -> Outcome:
    """What is found beside a verdict that accuses nobody is told, and fails nothing."""
    return "failure" if result.status == "divergent" else "skipped"


def _accused(culprit: Culprit) -> str:
    operator = f" ({culprit.operator})" if culprit.operator else ""
    return f"{culprit.point}{operator} {side_words(culprit.side)}"


def _why(verdict: Verdict) -> str:
    said = list(verdict.reasons)
    gap, budget = verdict.gap, verdict.rounding_budget
    if gap is not None:
        said.append(
            f"gap: mean {nat(gap.mae)} nat, p99 {nat(gap.p99)}, max {nat(gap.max)}, over "
            f"{gap.rows:,} tokens"
        )
    if budget is not None:
        said.append(f"rounding: {nat(budget.predicted_gap)} nat predicted between the two sides")
    said += [f"note: {note}" for note in verdict.coverage.notes]
    return "\n".join([*said, *_next(verdict)])


def _evidence(verdict: Verdict, culprit: Culprit) -> str:
    said = [f"where: {culprit.where}"]
    if culprit.own_error == culprit.own_error:
        said.append(f"own error {times(culprit.own_error)} rounding, floor {times(culprit.floor)}")
    return "\n".join([*said, *culprit.evidence, *_next(verdict)])


def _next(verdict: Verdict) -> list[str]:
    return [f"next: {verdict.next}"] if verdict.next else []


def _pairs(result: VerdictResult) -> Iterator[Case]:
    """Ask of each pair of columns whether it is within the tolerance."""
    verdict = result.verdict
    assert verdict.scores is not None
    tolerance = verdict.scores.tolerance
    for pair in verdict.scores.pairs:
        within = pair.gap.mae <= tolerance and not pair.gap.nonfinite
        said = (
            f"mean absolute difference {nat(pair.gap.mae)} nat, tolerance {nat(tolerance)}; mean "
            f"{nat(pair.gap.signed_mean)}, max {nat(pair.gap.max)}, over {pair.gap.rows:,} tokens"
        )
        outcome = "passed" if within else _blamed(result)
        yield Case(f"{pair.name} is within the tolerance", outcome, said)


def _of_replays(result: ReplayResult) -> Iterator[Case]:
    if not result.replays:
        yield Case("operators were replayed", "error", "nothing could be replayed")
    outcomes: dict[str, Outcome] = {
        "acquitted": "passed",
        "convicted": "failure",
        # another stretch that is convicted makes the result a failure
        "inconclusive": "error" if result.exit_code == 2 else "skipped",
    }
    for replay in result.replays:
        name = f"{replay.point} ({', '.join(replay.covers)})"
        body = "\n".join([replay.conclusion, *(figures(replay.engine) if replay.engine else [])])
        yield Case(name, outcomes[replay.status], finding(replay), body)
        for one in replay.results:
            yield _implementation(replay, one)
    for point, why in result.left_out.items():
        yield Case(f"{point} is replayed", "skipped", why)


def _implementation(replay: Replay, one: Ran) -> Case:
    name = f"{replay.point}: {one.name}"
    said = "; ".join(notes(one))
    body = "\n".join(figures(one.errors)) if one.errors is not None else ""
    if one.errors is None or one.state != "ran":
        return Case(name, "skipped", said or one.state, body)
    if not one.errors.convicted:
        return Case(name, "passed", said, body)
    # where the engine's own output is known it is what counts, and not another implementation
    outcome: Outcome = "failure" if replay.engine is None else "skipped"
    return Case(name, outcome if replay.status == "convicted" else "skipped", said, body)


def _of_accuracy(result: AccuracyResult) -> Iterator[Case]:
    for one in result.summary.groups:
        name = f"{one.of}: {one.name}" if one.of else one.name
        said = (
            f"{one.right:,} of {one.total:,} right, 95 % interval {one.low:.1%} to {one.high:.1%}"
        )
        yield Case(name, "passed", said)
    misses = (f"{m.case}: planted {m.planted}, named {m.named}" for m in result.summary.misses)
    yield Case("how often verdicts are right", "passed", result.summary.measured, "\n".join(misses))


def _of_selftest(result: SelfTestResult) -> Iterator[Case]:
    for one in result.data["tried"]:
        planted = one["planted"]
        name = "the clean pair is not accused" if planted is None else planted_words(planted)
        said = f"the verdict says {named_words(one)}"
        body = "\n".join([*one["mistakes"], *one["reasons"]])
        if one["right"]:
            yield Case(name, "passed", said, "", one["seconds"])
        else:
            yield Case(name, "failure", f"{said}: it is wrong", body, one["seconds"])
    for left in result.data["left_out"]:
        said = left_out_words(left["fault"], left["why"], left["instead"])
        yield Case(left["fault"], "skipped", said)
