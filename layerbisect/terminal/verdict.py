"""Print a verdict for people: its sentence first, then the evidence, then what could not be seen.

Everything is plain text that colour only supports, and fits in 100 columns.
"""

from __future__ import annotations

import math

from rich.console import Console

from layerbisect.bisect.verdict import OTHER_WEIGHTS, Culprit, RoundingBudget, Verdict
from layerbisect.terminal.layers import differences_table, layers_table
from layerbisect.terminal.routing import render_routing
from layerbisect.terminal.sensitivity import sensitivity_table, smallest_words
from layerbisect.terminal.table import Bar, Column, Table
from layerbisect.terminal.text import STYLES, headline_line, line, next_line, title
from layerbisect.wording import count, listed, nat, percent, times

_LABEL = 9
BAR = 20

_PLAIN_RATIO = 2.0
"""An own error this many times its floor convicts by its size alone."""


def headline(verdict: Verdict) -> str:
    """Say the verdict in one sentence."""
    return f"{verdict.status}: {_finding(verdict)}"


def _finding(verdict: Verdict) -> str:
    gap, budget = verdict.gap, verdict.rounding_budget
    if verdict.culprits:
        more = len(verdict.culprits) - 1
        others = f"; and {count(more, 'more culprit')}" if more else ""
        return _conviction(verdict.culprits[0]) + others
    if verdict.status == "agree" and gap is not None:
        if gap.max == 0 and not gap.nonfinite:
            return f"the log-probs of {count(gap.rows, 'token')} are equal"
        if budget is not None and gap.mae <= budget.predicted_gap:
            return (
                f"the gap of {nat(gap.mae)} nat is rounding "
                f"({nat(budget.predicted_gap)} predicted for this model and dtype)"
            )
    if verdict.reasons:
        return verdict.reasons[0]
    if verdict.status == "divergent" and gap is not None:
        return f"the gap of {nat(gap.mae)} nat is beyond rounding, and no operator is convicted"
    return "no reason was given"


def _conviction(culprit: Culprit) -> str:
    if culprit.operator in ("logprob", "inputs") and culprit.evidence:
        # of the record: no operator erred, and the gap of the captures is another one
        return f"the record's scores {side_words(culprit.side)}: {culprit.evidence[0]}"
    operator = f" ({culprit.operator})" if culprit.operator else ""
    place = culprit.point
    if culprit.layer is not None and not f"{place}.".startswith(f"layers.{culprit.layer}."):
        # in a coarse capture it shows first where the next layer begins
        place = f"layer {culprit.layer} ({place})"
    said = f"{place}{operator} {side_words(culprit.side)}"
    proof = f"own error {_own(culprit)}"
    # what a fit or a few rows convict is within rounding over most rows, and a choice is no size
    by_size = culprit.own_error > _PLAIN_RATIO * max(culprit.floor, 1.0)
    said_first = culprit.operator == "weights" or OTHER_WEIGHTS in "".join(culprit.evidence[:1])
    if culprit.evidence and (said_first or not by_size or culprit.point.endswith("expert_ids")):
        proof = culprit.evidence[0].removeprefix(f"{culprit.point}: ")
    if culprit.share_of_gap is not None and culprit.share_of_gap > 0 and not is_everywhere(culprit):
        return f"{said} makes {percent(culprit.share_of_gap)} of the gap; {proof}"
    return f"{said}: {proof}"


def is_everywhere(culprit: Culprit) -> bool:
    """Whether it errs in most layers: the share of all of them is no share of what it makes."""
    return culprit.point.startswith("layers.*")


def _own(culprit: Culprit) -> str:
    return f"{times(culprit.own_error)} rounding (floor {times(culprit.floor)})"


def side_words(side: str) -> str:
    """Say on which side something is."""
    if side == "both":
        return "on both sides"
    return "on an unknown side" if side == "unknown" else f"on the {side} side"


def costliest_words(budget: RoundingBudget) -> str:
    """Say which kind of operator to raise to float32, and what it brings; "" where none rounds."""
    kind = max(budget.shares, key=lambda one: budget.shares[one], default="")
    if not kind or budget.shares[kind] <= 0 or budget.quadrature <= 0:
        return ""
    left = math.sqrt(max(0.0, 1 - (budget.shares[kind] / budget.quadrature) ** 2))
    before, after = nat(budget.predicted_gap), nat(budget.predicted_gap * left)
    return (
        f"{kind}; with it in float32 on both sides the predicted gap falls from {before} to about "
        f"{after}"
    )


def render_verdict(verdict: Verdict, console: Console, *, verbose: bool = False) -> None:
    """Print ``verdict``; ``verbose`` shows every layer, and how each point differs."""
    _Page(verdict, console, verbose).print()


class _Page:
    def __init__(self, verdict: Verdict, console: Console, verbose: bool) -> None:
        self.verdict = verdict
        self.console = console
        self.verbose = verbose
        self.mark = "#" if console.options.ascii_only else "█"

    def print(self) -> None:
        verdict = self.verdict
        first = headline(verdict)
        headline_line(self.console, first, STYLES[verdict.status])
        # the first reason of a conviction or of an agreement is what the sentence says
        said = verdict.status == "agree" or bool(verdict.culprits)
        for reason in verdict.reasons[int(said) :]:
            if reason not in first:
                self._line(reason, 2)
        self._gap()
        self._culprits()
        if verdict.layers:
            self._title("layers")
            layers_table(verdict, self.mark, self.verbose).print(self.console)
        if verdict.routing is not None:
            render_routing(verdict.routing, verdict.labels, self.console, verbose=self.verbose)
        if verdict.rounding_budget is not None:
            self._budget(verdict.rounding_budget)
        if verdict.ruled_out:
            self._title("ruled out")
            for out in verdict.ruled_out:
                self._line(f"{out.hypothesis}: {out.evidence}", 2, hang=2)
        if self.verbose and verdict.differences:
            self._title("points, first side against second")
            differences_table(verdict).print(self.console)
        self._coverage()
        next_line(self.console, verdict.next)

    def _title(self, text: str) -> None:
        title(self.console, text)

    def _line(self, text: str, indent: int, hang: int = 0) -> None:
        line(self.console, text, indent, hang)

    def _fact(self, label: str, text: str) -> None:
        self._line(f"{label:<{_LABEL}} {text}", 0, hang=_LABEL + 1)

    def _gap(self) -> None:
        gap, budget = self.verdict.gap, self.verdict.rounding_budget
        if gap is None:
            return
        self.console.print()
        a, b = self.verdict.labels
        self._fact(
            "gap",
            f"mean {nat(gap.mae)} nat, p95 {nat(gap.p95)}, p99 {nat(gap.p99)}, "
            f"max {nat(gap.max)}, over {count(gap.rows, 'token')}",
        )
        self._fact("signed", f"mean {gap.signed_mean:+.4f} nat, {a} minus {b}")
        if gap.source == "read-out":
            self._fact("source", "no scores captured: last states read out by the reference's head")
        if gap.nonfinite:
            self._fact("left out", f"{count(gap.nonfinite, 'token')} whose log-prob is not finite")
        if budget is not None:
            ratio = gap.mae / budget.predicted_gap if budget.predicted_gap > 0 else math.nan
            text = f"{nat(budget.predicted_gap)} nat predicted between the two sides"
            if math.isfinite(ratio):
                text += f"; the gap is {times(ratio)} that"
            self._fact("rounding", text)

    def _culprits(self) -> None:
        if not self.verdict.culprits:
            return
        self._title("culprits" if len(self.verdict.culprits) > 1 else "culprit")
        for number, one in enumerate(self.verdict.culprits, 1):
            operator = one.operator or "operator unknown"
            layer = "" if one.layer is None else f"layer {one.layer}, "
            self._line(f"{number}. {one.point}  {operator}, {layer}{side_words(one.side)}", 2)
            share = "share not probed"
            if one.share_of_gap is not None:
                share = f"{percent(one.share_of_gap)} of the squared gap"
            self._line(f"{share}; own error {_own(one)}; where: {one.where}", 5)
            for sentence in one.evidence:
                self._line(f"- {sentence}", 5, hang=2)

    def _budget(self, budget: RoundingBudget) -> None:
        self._title(f"rounding budget, nat from full precision over {count(budget.rows, 'token')}")
        table = Table((Column("", "name"), Column(""), Column("", "bar")))
        shares = sorted(budget.shares.items(), key=lambda item: -item[1])
        largest = shares[0][1] if shares else 0.0
        for kind, share in shares:
            if share > 0:
                table.add(f"{kind:<{_LABEL}}", nat(share), Bar("", share, largest, self.mark, BAR))
        table.print(self.console, 2)
        apart = ""
        if budget.whole > 0:
            apart = f" ({percent(abs(budget.quadrature / budget.whole - 1))} apart)"
        sides = ", ".join(
            f"{label} {nat(d) if math.isfinite(d) else 'without scores'}"
            for label, d in budget.distances.items()
        )
        self._line(
            f"the kinds add in quadrature to {nat(budget.quadrature)}, "
            f"the whole model rounded is {nat(budget.whole)}{apart}",
            2,
        )
        self._line(f"as captured: {sides}", 2)
        costliest = costliest_words(budget)
        if costliest:
            self._line(f"costliest: {costliest}", 2)

    def _coverage(self) -> None:
        verdict = self.verdict
        points, rows = verdict.coverage.points, verdict.coverage.rows
        self._title("coverage")
        missing = f"; missing {listed(points.missing)}" if points.missing else "; none missing"
        self._fact("  points", f"{points.compared:,} compared{missing}")
        self._fact("  rows", f"{rows.joined:,} joined, {rows.left_out:,} left out")
        if verdict.probe is not None:
            probe = verdict.probe
            how = "every boundary" if probe.mode == "scan" else "boundaries chosen by halving"
            one = "partial forward" if probe.tail == "reference" else "forward"
            forwards = f"{count(probe.forwards, one)} of the {probe.tail}"
            self._fact("  probes", f"{probe.mode} ({how}), {forwards}")
        seen = smallest_words(verdict)
        if seen:
            self._fact("  seen", f"the smallest that would have been convicted: {seen}")
        for note in verdict.coverage.notes:
            self._line(f"note: {note}", 2, hang=2)
        if seen and self.verbose:
            self._title("smallest fault that would have been convicted")
            sensitivity_table(verdict).print(self.console)
