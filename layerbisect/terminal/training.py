"""Print for people how a training forward compares with the frozen one."""

from __future__ import annotations

import math

from rich.console import Console

from layerbisect.bisect.training_report import Apart, Cause, RouteOrigin, TrainingVerdict
from layerbisect.terminal.table import Column, Table
from layerbisect.terminal.text import STYLES, headline_line, line, next_line, title
from layerbisect.wording import count, listed, mode_words, nat

_SHOWN = 10
"""So many points and layers are shown where not all are asked for."""


def headline(verdict: TrainingVerdict) -> str:
    """Say the result in one sentence."""
    if verdict.status == "inconclusive":
        return f"{verdict.status}: {verdict.reasons[0]}"
    more = [cause for cause in verdict.causes if cause.kind != "rounding"]
    if more:
        return f"{verdict.status}: {more[0].point} is where they part: {more[0].sentence}"
    if verdict.recomputed.wrong:
        cause = next(c for c in verdict.recomputed.causes if c.kind != "rounding")
        return f"{verdict.status}: the backward computes another {cause.point}: {cause.sentence}"
    if verdict.status == "divergent":
        return f"{verdict.status}: {verdict.reasons[0]}"
    if verdict.first is not None:
        return f"{verdict.status}: they differ by rounding, from {verdict.first.point} on"
    points, rows = verdict.coverage.points.compared, verdict.coverage.rows.joined
    return (
        f"{verdict.status}: the training forward repeats the frozen one bit for bit "
        f"({count(points, 'point')}, {count(rows, 'row')})"
    )


def render_training(verdict: TrainingVerdict, console: Console, *, verbose: bool = False) -> None:
    """Print ``verdict``; ``verbose`` shows every point and every layer."""
    said = headline(verdict)
    headline_line(console, said, STYLES[verdict.status])
    for reason in verdict.reasons:
        if reason not in said:
            line(console, reason, 2)
    if verdict.gap is not None and verdict.gap.mae:
        gap = verdict.gap
        sizes = f"{nat(gap.mae)} nat on average, {nat(gap.max)} at most"
        line(console, f"log-probs of {count(gap.rows, 'token')} differ by {sizes}", 2)
    limit = len(verdict.points) if verbose else _SHOWN
    if verdict.points:
        _points(verdict.points, verdict.causes, "where they differ, in order", limit, console)
    flipped = [origin for origin in verdict.routing if origin.flips]
    if flipped:
        _routing(flipped, len(flipped) if verbose else _SHOWN, console)
    _recomputed(verdict, len(verdict.recomputed.differing) if verbose else _SHOWN, console)
    _mode(verdict, console)
    _coverage(verdict, console)
    next_line(console, verdict.next)


def _points(
    points: tuple[Apart, ...],
    causes: tuple[Cause, ...],
    what: str,
    limit: int,
    console: Console,
) -> None:
    title(console, what)
    table = _table("point", "rows", "differ", "by", "rounding")
    of_cause = {cause.point for cause in causes}
    # those that are explained are never left out
    shown = [p for at, p in enumerate(points) if at < limit or p.point in of_cause]
    for point in shown:
        table.add(
            point.point,
            f"{point.rows:,}",
            f"{point.differing:,}",
            _size(point.size),
            # what is inherited is not of one operator's size
            _size(point.allowed) if point.point in of_cause and point.size is not None else "",
        )
    table.print(console, 2)
    if len(points) > len(shown):
        line(console, f"and {count(len(points) - len(shown), 'more point')}", 2)
    for cause in causes[:limit]:
        line(console, f"{cause.point}: {cause.sentence}", 2, 2)


def _routing(origins: list[RouteOrigin], limit: int, console: Console) -> None:
    title(console, "tokens that other experts get")
    table = _table("layer", "rows", "other", "inherited", "other logits", "other choice", "unknown")
    for one in origins[:limit]:
        numbers = (one.rows, one.flips, one.inherited, one.logits, one.choice, one.unknown)
        table.add(str(one.layer), *(f"{number:,}" for number in numbers))
    table.print(console, 2)
    if origins[limit:]:
        line(console, f"and {count(len(origins) - limit, 'more layer')}", 2)


def _recomputed(verdict: TrainingVerdict, limit: int, console: Console) -> None:
    found = verdict.recomputed
    if not found.seen:
        return
    points = f"{count(found.points, 'point')}, {count(found.rows, 'row')}"
    if found.differing:
        what = f"what the backward computed again ({points}) differs from the forward's"
        _points(found.differing, found.causes, what, limit, console)
    else:
        title(console, "recomputation")
        line(console, f"the backward computes the same again, bit for bit ({points})", 2)


def _mode(verdict: TrainingVerdict, console: Console) -> None:
    mode = verdict.mode
    if mode is None:
        return
    title(console, "the training forward")
    line(console, mode_words(mode), 2)
    if mode.dropout:
        line(console, f"dropout in {listed([drop.module for drop in mode.dropout])}", 2)


def _coverage(verdict: TrainingVerdict, console: Console) -> None:
    covered = verdict.coverage
    title(console, "coverage")
    line(
        console,
        f"{count(covered.points.compared, 'point')} compared over {covered.rows.joined:,} rows; "
        f"{count(covered.rows.left_out, 'row')} left out",
        2,
    )
    if covered.points.missing:
        line(console, f"not compared: {listed(covered.points.missing)}", 2)
    for note in covered.notes:
        line(console, note, 2)


def _table(first: str, *others: str) -> Table:
    return Table([Column(first, "words"), *(Column(name) for name in others)], heads="bold")


def _size(size: float | None) -> str:
    if size is None:
        return "-"
    return f"{size:.2g}" if math.isfinite(size) else "not finite"
