"""Print the results of a case, each as its own command does."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from layerbisect.report.results import AccuracyResult, ReplayResult, Result, VerdictResult
from layerbisect.report.summary import sentence
from layerbisect.terminal.replay import render_replays
from layerbisect.terminal.scores import render_scores
from layerbisect.terminal.text import line
from layerbisect.terminal.verdict import render_verdict
from layerbisect.wording import percent


def render_results(results: Sequence[Result], console: Console) -> None:
    """Print ``results`` one after another, under their names where they are several."""
    for number, one in enumerate(results):
        if number:
            console.print()
        if len(results) > 1:
            console.print(Text(f"== {one.name}", style="bold"))
        _render(one, console)


def _render(result: Result, console: Console) -> None:
    if isinstance(result, VerdictResult):
        if result.explained:
            line(console, f"{result.status}: {sentence(result)}", 0, 2)
            console.print()
        (render_scores if result.verdict.of_scores else render_verdict)(result.verdict, console)
        if result.planted is not None:
            console.print()
            line(console, result.planted, 0, 2)
    elif isinstance(result, ReplayResult):
        render_replays(result.replays, result.left_out, console, pairs=result.pairs)
    else:
        line(console, f"{result.status}: {sentence(result)}", 0, 2)
        if isinstance(result, AccuracyResult):
            for group in result.summary.groups:
                share = percent(group.right / group.total) if group.total else "-"
                line(console, f"{group.name}: {share} ({group.right} of {group.total})", 2, 2)
