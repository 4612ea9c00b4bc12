"""The first screen: what is wrong, how sure that is, what was not seen, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerbisect.bisect.verdict import Culprit
from layerbisect.replay_words import finding
from layerbisect.report.results import (
    AccuracyResult,
    ReplayResult,
    Result,
    SelfTestResult,
    VerdictResult,
    leading,
)
from layerbisect.terminal.scores import headline as scores_headline
from layerbisect.terminal.sensitivity import smallest_words
from layerbisect.terminal.verdict import headline, is_everywhere, side_words
from layerbisect.wording import commands_in, count, listed, nat, percent, times

OPERATORS = {
    "embedding": "the embedding",
    "norm": "RMS norm",
    "linear": "a linear projection",
    "rope": "the rotary embedding (RoPE)",
    "attention": "attention",
    "router": "the MoE router",
    "experts": "the MoE experts",
    "combine": "how experts' outputs are combined",
    "residual": "the residual sum",
    "head": "the head (final projection to logits)",
    "logprob": "how log-probs are scored or kept",
    "inputs": "the tokens or the mask that were scored",
}
"""A culprit's operator in words for people who have not read any code of this."""

_EVIDENCE = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of the first screen, and what it is."""

    value: str
    what: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The first screen of a case.

    ``status`` is the leading result's, ``title`` says in plain words what is wrong, ``sentence`` is
    the verdict as the terminal prints it. ``next`` are words, and (True) commands to copy among
    them. ``results`` has a name, a status and a sentence for each result of the case.
    """

    status: str
    title: str
    sentence: str
    figures: tuple[Figure, ...]
    sure: tuple[str, ...]
    unseen: tuple[str, ...]
    next: tuple[tuple[str, bool], ...]
    results: tuple[tuple[str, str, str], ...]
    planted: str | None


def summarize(results: Sequence[Result]) -> Summary:
    """Say what a case comes to; the worst result leads."""
    lead = leading(results)
    verdict = lead.verdict if isinstance(lead, VerdictResult) else None
    return Summary(
        status=lead.status,
        title=_title(lead),
        sentence=sentence(lead),
        figures=_figures(lead) if isinstance(lead, VerdictResult) else (),
        sure=_sure(lead),
        unseen=_unseen(lead),
        next=() if verdict is None else tuple(commands_in(verdict.next)),
        results=tuple((one.name, one.status, sentence(one)) for one in results),
        planted=next(
            (r.planted for r in results if isinstance(r, VerdictResult) and r.planted), None
        ),
    )


def sentence(result: Result) -> str:
    """Say a result in one sentence, without its status."""
    if isinstance(result, VerdictResult):
        said = (scores_headline if result.verdict.of_scores else headline)(result.verdict)
        said = said.partition(": ")[2]
        if not result.explained:
            return said
        return f"each gap is rounding by {' and '.join(result.explained)}: {said}"
    if isinstance(result, ReplayResult):
        if not result.replays:
            return "nothing was replayed"
        worst = next((r for r in result.replays if r.status == result.status), result.replays[0])
        more = len(result.replays) - 1
        said = f"{worst.point} ({', '.join(worst.covers)}): {finding(worst)}"
        return said + (f"; and {count(more, 'more stretch')}" if more else "")
    if isinstance(result, AccuracyResult):
        return result.summary.measured
    found, planted = result.data["found"], result.data["planted"]
    clean = "the clean pair is accused" if result.data["clean_accused"] else "the clean pair is not"
    return f"{found} of {planted} planted faults were named rightly, and {clean}"


def _title(result: Result) -> str:
    if isinstance(result, VerdictResult):
        return _verdict_title(result)
    if isinstance(result, ReplayResult):
        return {
            "convicted": "The engine's output is beyond rounding, on the input that it was given",
            "acquitted": "Rounding explains what the engine returned",
        }.get(result.status, "It could not be judged")
    if isinstance(result, SelfTestResult):
        passed = result.data["passed"]
        return "Every verdict was right" if passed else "A verdict was not right"
    return "How often verdicts are right"


def _verdict_title(result: VerdictResult) -> str:
    verdict = result.verdict
    if verdict.culprits and result.status == "divergent":
        first = verdict.culprits[0]
        more = len(verdict.culprits) - 1
        others = f", and {count(more, 'more fault')}" if more else ""
        return _fault(first) + others
    if result.status == "agree":
        if verdict.gap is not None and verdict.gap.max == 0 and not verdict.gap.nonfinite:
            return "No gap: the log-probs are equal"
        if result.verdict.of_scores and not result.explained:
            # what scores alone show is a size, and not what makes it
            return "The scores agree within the tolerance"
        return "No bug: the gap is rounding"
    if verdict.status == "divergent" and result.verdict.of_scores:
        return "The scores differ beyond the tolerance, and do not show what makes it"
    return {
        "divergent": "The two sides differ by more than rounding, and no operator is convicted",
        "unstable": "Not judged: a side does not repeat itself",
    }.get(verdict.status, "It could not be judged: nobody is accused, and nobody is cleared")


def _fault(culprit: Culprit) -> str:
    if culprit.operator == "weights":
        return f"Other weights, {side_words(culprit.side)}"
    what = OPERATORS.get(culprit.operator or "", "a layer whose inside was not captured")
    layer = "" if culprit.layer is None else f" of layer {culprit.layer}"
    return f"A fault in {what}{layer}, {side_words(culprit.side)}"


def _figures(result: VerdictResult) -> tuple[Figure, ...]:
    verdict = result.verdict
    found = []
    gap, budget = verdict.gap, verdict.rounding_budget
    if gap is not None and gap.rows:
        found.append(Figure(f"{nat(gap.mae)} nat", f"mean gap, {count(gap.rows, 'token')}"))
    # a reference that is not known to be the right one predicts nothing
    if budget is not None and verdict.status in ("agree", "divergent"):
        found.append(Figure(f"{nat(budget.predicted_gap)} nat", "gap that rounding alone makes"))
    if verdict.culprits and verdict.status == "divergent":
        first = verdict.culprits[0]
        if not result.verdict.of_scores and first.own_error == first.own_error:
            floor = f"(a clean one: {times(first.floor)})"
            found.append(Figure(times(first.own_error), f"its error in units of rounding {floor}"))
        if first.share_of_gap is not None and not is_everywhere(first):
            squared = "" if result.verdict.of_scores else "squared "
            share = percent(first.share_of_gap)
            found.append(Figure(share, f"of the {squared}gap is made there"))
    return tuple(found)


def _sure(result: Result) -> tuple[str, ...]:
    if not isinstance(result, VerdictResult):
        return ()
    verdict = result.verdict
    said: list[str] = []
    if verdict.culprits:
        first_of_all, *others = verdict.culprits[0].evidence or ("",)
        # fits of one kind are many and alike
        others.sort(key=lambda one: "systematic, " in one and "eps" not in one)
        said += [one for one in (first_of_all, *others) if one][:_EVIDENCE]
    first = sentence(result)
    # the first reason of a conviction or of an agreement is what the sentence says
    told = verdict.status == "agree" or bool(verdict.culprits)
    said += [one for one in verdict.reasons[int(told) :] if one not in first][:_EVIDENCE]
    if verdict.ruled_out and verdict.status in ("agree", "divergent"):
        names = ", ".join(out.hypothesis for out in verdict.ruled_out[:3])
        more = len(verdict.ruled_out) - 3
        said.append(f"ruled out: {names}" + (f", and {more} more" if more > 0 else ""))
    if verdict.status == "agree" and verdict.own_errors:
        judged = count(len(verdict.own_errors), "operator")
        said.append(f"none of {judged} on both sides errs beyond rounding, on its own input")
    seen = smallest_words(verdict)
    if seen and verdict.status == "agree":
        said.append(f"the smallest fault that would have been convicted: {seen}")
    points, rows = verdict.coverage.points, verdict.coverage.rows
    scores = verdict.scores
    if scores is not None:
        responses = count(scores.responses, "response")
        said.append(f"{count(scores.tokens, 'token')} of {responses} compared")
    elif points.compared:
        said.append(f"{count(points.compared, 'point')} compared over {count(rows.joined, 'row')}")
    return tuple(said)


def _unseen(result: Result) -> tuple[str, ...]:
    if isinstance(result, ReplayResult):
        return tuple(f"{point} was not replayed: {why}" for point, why in result.left_out.items())
    if not isinstance(result, VerdictResult):
        return ()
    coverage, missing = result.verdict.coverage, result.verdict.coverage.points.missing
    said = list(coverage.notes)
    if missing:
        what = (
            "not scored" if result.verdict.of_scores else f"{count(len(missing), 'point')} not seen"
        )
        said.insert(0, f"{what}: {listed(missing)}")
    if coverage.rows.left_out:
        what = "token" if result.verdict.of_scores else "row"
        why = "by the mask, or unscored" if result.verdict.of_scores else "only one side has them"
        said.insert(0, f"{count(coverage.rows.left_out, what)} left out: {why}")
    return tuple(said)
