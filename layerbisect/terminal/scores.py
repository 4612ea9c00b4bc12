"""Print a verdict on scores: its sentence, the gaps among A, B and C, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console

from layerbisect.bisect.scores.explain import chance
from layerbisect.bisect.scores.report import Effect, Finding, PairReport, ScoreReport, TokenGap
from layerbisect.bisect.verdict import Culprit, RuledOut, Verdict
from layerbisect.score_words import (
    amount,
    clipped_words,
    divergence_words,
    exact,
    positions,
    ratio_words,
    repeat_pairs,
    sample_words,
)
from layerbisect.terminal.table import Column, Table
from layerbisect.terminal.text import STYLES, headline_line, line, next_line, title
from layerbisect.terminal.verdict import side_words
from layerbisect.wording import count, listed, percent, times

_SHOWN_TOKENS = 5


def headline(verdict: Verdict) -> str:
    """Say the verdict in one sentence."""
    if verdict.culprits:
        first = verdict.culprits[0]
        more = len(verdict.culprits) - 1
        others = f"; and {count(more, 'more culprit')}" if more else ""
        proof = first.evidence[0] if first.evidence else first.where
        what = first.operator or "operator unknown"
        return f"{verdict.status}: {what} {side_words(first.side)}: {proof}{others}"
    said = verdict.reasons[0] if verdict.reasons else "no reason was given"
    return f"{verdict.status}: {said}"


def render_scores(verdict: Verdict, console: Console, *, verbose: bool = False) -> None:
    """Print ``verdict``; ``verbose`` shows every finding, position and worst token."""
    _Page(verdict, console, verbose).print()


class _Page:
    def __init__(self, verdict: Verdict, console: Console, verbose: bool) -> None:
        self.verdict = verdict
        self.console = console
        self.verbose = verbose

    def print(self) -> None:
        verdict = self.verdict
        first = headline(verdict)
        headline_line(self.console, first, STYLES[verdict.status])
        for reason in verdict.reasons:
            if reason not in first:
                self._line(reason)
        scores = verdict.scores
        if scores is not None:
            self._gaps(scores)
            self._steps(scores)
        self._culprits(verdict.culprits)
        if scores is not None:
            self._findings(scores.findings)
            self._worst(scores.pairs)
            if self.verbose:
                self._positions(scores.pairs)
            if scores.effect is not None:
                self._effect(scores.effect)
        self._ruled_out(verdict.ruled_out)
        self._coverage()
        next_line(self.console, verdict.next)

    def _title(self, text: str) -> None:
        title(self.console, text)

    def _line(self, text: str, indent: int = 2) -> None:
        line(self.console, text, indent, 2)

    def _table(self, headers: Sequence[str], rows: Sequence[Sequence[str]], keys: int = 1) -> None:
        first, *figures = headers
        columns = [Column(first, "words"), *(Column(header) for header in figures)]
        table = Table(columns, keys=keys, heads="dim")
        for row in rows:
            table.add(*row)
        table.print(self.console, 2)

    def _gaps(self, scores: ScoreReport) -> None:
        self._title(f"gaps in nat, over {amount(scores)}")
        rows = [
            (
                p.name,
                ("+" if p.gap.signed_mean >= 0 else "") + exact(p.gap.signed_mean),
                *map(exact, (p.gap.mae, p.gap.p95, p.gap.p99, p.gap.max)),
                exact(p.first_token.mae) if p.first_token else "-",
                exact(p.later.mae) if p.later else "-",
            )
            for p in scores.pairs
        ]
        headers = ("", "mean", "MAE", "p95", "p99", "max", "first", "later")
        self._table(headers, rows)
        for repeat in scores.repeats:
            self._line(
                f"repeats of {repeat.letter}, {repeat.kind} ({repeat_pairs(repeat)}): "
                f"MAE {exact(repeat.mae)}, max {exact(repeat.max)}; "
                f"{count(repeat.moved_tokens, 'token')} moved by more than {repeat.tolerance:g}"
            )
            if repeat.moved_tokens:
                shown = repeat.moved if self.verbose else repeat.moved[:_SHOWN_TOKENS]
                self._tokens(f"moved, {repeat.letter}", shown)
        for split in scores.splits:
            self._line(f"{split.first}-{split.second}: {split.summary}")
        self._line(f"tolerance {scores.tolerance:g}" + _floors(scores))
        if scores.closing is not None:
            self._line(f"A-C = (A-B) + (B-C) closes to {scores.closing:.1e}")

    def _steps(self, scores: ScoreReport) -> None:
        if not scores.steps:
            return
        names = list(scores.steps[0].maes)
        self._title("MAE by step")
        rows = [
            (
                "-" if one.step is None else str(one.step),
                *(exact(one.maes.get(name, math.nan)) for name in names),
                *(one.weights.get(side, "-")[:12] for side in ("rollout", "trainer")),
            )
            for one in scores.steps
        ]
        self._table(("step", *names, "rollout weights", "trainer weights"), rows)

    def _culprits(self, culprits: Sequence[Culprit]) -> None:
        if not culprits:
            return
        self._title("culprits" if len(culprits) > 1 else "culprit")
        for number, one in enumerate(culprits, 1):
            operator = one.operator or "operator unknown"
            self._line(f"{number}. {one.point}  {operator}, {side_words(one.side)}; {one.where}")
            facts = []
            if one.share_of_gap is not None:
                facts.append(f"explains {percent(one.share_of_gap)} of the absolute gap")
            if math.isfinite(one.own_error):
                facts.append(f"{times(one.own_error)} the gap of the two that agree")
            if facts:
                self._line("; ".join(facts), 5)
            for sentence in one.evidence:
                self._line(f"- {sentence}", 5)

    def _findings(self, findings: Sequence[Finding]) -> None:
        convicted = {sentence for c in self.verdict.culprits for sentence in c.evidence}
        rest = [f for f in findings if f"{f.test}: {f.summary}" not in convicted]
        if not rest:
            return
        self._title("also seen in the differences")
        for finding in rest:
            self._line(
                f"{finding.pair}  {finding.test}: {finding.summary} (explains "
                f"{percent(finding.explains)}, chance {chance(finding.false_alarm)})"
            )
            if self.verbose:
                for sentence in finding.evidence:
                    self._line(f"- {sentence}", 5)

    def _worst(self, pairs: Sequence[PairReport]) -> None:
        if self.verdict.status == "agree" and not self.verbose:
            return
        for pair in pairs:
            if pair.gap.max == 0:
                continue
            if self.verbose or pair is max(pairs, key=lambda p: p.gap.mae):
                shown = pair.worst if self.verbose else pair.worst[:_SHOWN_TOKENS]
                self._title(f"worst tokens of {pair.name}")
                self._tokens("", shown, pair.first, pair.second)

    def _tokens(
        self, name: str, tokens: Sequence[TokenGap], first: str = "one", second: str = "other"
    ) -> None:
        rows = [
            (t.call, str(t.position), str(t.token), exact(t.first), exact(t.second))
            + (f"{t.difference:+.6f}",)
            for t in tokens
        ]
        self._table((name or "call", "position", "token", first, second, "difference"), rows, 3)

    def _positions(self, pairs: Sequence[PairReport]) -> None:
        self._title("MAE by response position")
        spans = [(p.start, p.stop) for p in max((p.by_position for p in pairs), key=len)]
        of = [{(b.start, b.stop): b for b in p.by_position} for p in pairs]
        rows = [
            (
                positions(start, stop),
                *(exact(bins[start, stop].mae) if (start, stop) in bins else "-" for bins in of),
            )
            for start, stop in spans
        ]
        self._table(("position", *(p.name for p in pairs)), rows)

    def _effect(self, effect: Effect) -> None:
        self._title(
            f"what it does to training, by the ratio exp({effect.trainer} - {effect.rollout})"
        )
        self._line(f"{ratio_words(effect)}; {clipped_words(effect)}")
        self._line(f"{sample_words(effect)}; {divergence_words(effect)}")

    def _ruled_out(self, ruled_out: Sequence[RuledOut]) -> None:
        if not ruled_out:
            return
        self._title("ruled out")
        plain: dict[str, list[str]] = {}
        for out in ruled_out:
            plain.setdefault(out.evidence, []).append(out.hypothesis)
        for evidence, hypotheses in plain.items():
            self._line(f"{', '.join(hypotheses)}: {evidence}")

    def _coverage(self) -> None:
        coverage = self.verdict.coverage
        missing = listed(coverage.points.missing)
        self._title("coverage")
        self._line(
            f"{count(coverage.rows.joined, 'token')} scored by all columns, "
            f"{coverage.rows.left_out:,} left out by the mask or unscored"
            + (f"; columns missing: {missing}" if missing else "")
        )
        for note in coverage.notes:
            self._line(f"note: {note}")


def _floors(scores: ScoreReport) -> str:
    if not scores.floors:
        return "; no repeats to learn one from"
    return "; from repeats: " + ", ".join(f"{n} {exact(v)}" for n, v in scores.floors.items())
