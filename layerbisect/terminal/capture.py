"""Print what a capture holds: a page about all of it, or the values of chosen points."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from layerbisect.bisect.progress import Progress
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from layerbisect.captures.summary import CaptureSummary, PointSummary
from layerbisect.terminal.table import Column, Table
from layerbisect.terminal.text import line
from layerbisect.wording import count, mode_words, size

_SEQUENCES = 8
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class PointValues:
    """A point and the range of its finite values; None where it holds none."""

    point: PointSummary
    smallest: float | None
    largest: float | None
    rms: float | None
    nonfinite: int

    def to_json(self) -> dict[str, Any]:
        """Return plain data, ready for ``json.dumps``."""
        values = dataclasses.asdict(self)
        return {**values.pop("point"), **values}


def point_values(
    capture: Capture, summary: CaptureSummary, pattern: str, progress: Progress
) -> list[PointValues]:
    """Read the points that match ``pattern``, one at a time.

    Raises LayerBisectError where none does.
    """
    chosen = [p for p in summary.points if fnmatch.fnmatchcase(p.name, pattern)]
    if not chosen:
        raise LayerBisectError(
            f"{capture.directory} has no point that matches {pattern!r}; "
            "`layerbisect show` without --point lists what it has"
        )
    progress.start("reading points", len(chosen))
    found = []
    for done, point in enumerate(chosen, 1):
        found.append(_values(capture, point))
        progress.advance(done)
    progress.done()
    return found


def _values(capture: Capture, point: PointSummary) -> PointValues:
    rows = np.flatnonzero(capture.has(point.name))
    if not len(rows):
        return PointValues(point, None, None, None, 0)
    values = np.asarray(capture.read(point.name, rows), np.float64)
    finite = values[np.isfinite(values)]
    bad = values.size - finite.size
    if not finite.size:
        return PointValues(point, None, None, None, bad)
    rms = float(np.sqrt(np.mean(np.square(finite))))
    return PointValues(point, float(finite.min()), float(finite.max()), rms, bad)


def render_points(points: Sequence[PointValues], console: Console) -> None:
    """Print one line a point."""
    figures = ("rows", "shape", "dtype", "smallest", "largest", "rms", "not\nfinite")
    table = _table(("point", "seen"), figures)
    for one in points:
        p = one.point
        numbers = (one.smallest, one.largest, one.rms)
        table.add(
            p.name,
            p.how.replace("_", " "),
            f"{p.rows:,}",
            "-" if p.shape is None else str(list(p.shape)),
            _dtype(p.dtype),
            *("-" if value is None else f"{value:.4g}" for value in numbers),
            f"{one.nonfinite:,}" if one.nonfinite else "",
        )
    table.print(console)


def render_summary(summary: CaptureSummary, console: Console) -> None:
    """Print a page about a capture."""
    state = "finished" if summary.finished else "NOT WHOLE"
    where = ", ".join(f"{name} {n}" for name, n in summary.parallel.items() if n > 1)
    moe = f", {len(summary.moe_layers)} of them with experts" if summary.moe_layers else ""
    phases = ", ".join(
        f"{count(p.passes, f'{name} pass')} of {count(p.rows, 'row')}"
        for name, p in summary.phases.items()
    )
    lines = [
        ("engine", f"{summary.engine} {summary.engine_version}, {summary.device}, {summary.dtype}"),
        ("layout", f"{count(summary.ranks, 'rank')}" + (f" ({where})" if where else "")),
        ("model", count(summary.num_layers, "layer") + moe),
        ("weights", summary.weight_version or "no version given"),
        ("passes", phases),
        *(("called in", mode_words(mode)) for mode in summary.modes),
        (
            "rows",
            f"{summary.rows:,}; {summary.repeated_rows:,} repeat an earlier one, "
            f"{summary.keyless_rows:,} cannot be joined (tokens before them are unknown)",
        ),
        ("scores", f"{summary.scores:,}; {summary.repeated_scores:,} repeat an earlier one"),
        ("size", size(summary.bytes)),
    ]
    title = f"{summary.label}: capture of {count(len(summary.sequences), 'sequence')}, {state}"
    console.print(Text(f"{title}, in {summary.directory}", style="bold"), soft_wrap=True)
    facts = Table((Column("", "name"), Column("", "words")))
    for fact in lines:
        facts.add(*fact)
    facts.print(console)
    for problem in summary.problems:
        line(console, f"problem: {problem}", 0, hang=2)
    _sequences(summary, console)
    _points(summary, console)


def _sequences(summary: CaptureSummary, console: Console) -> None:
    table = _table(("sequence",), ("tokens", "rows", "not joinable"))
    for one in summary.sequences[:_SEQUENCES]:
        name = f"{one.name} ({one.salt})" if one.salt else one.name
        table.add(
            name,
            f"{one.length:,}",
            f"{one.rows:,}",
            f"{one.keyless:,}" if one.keyless else "",
        )
    console.print()
    table.print(console)
    rest = len(summary.sequences) - _SEQUENCES
    if rest > 0:
        console.print(f"and {rest:,} more")


def _points(summary: CaptureSummary, console: Console) -> None:
    """Print one line for each kind of point, with the layers that have it."""
    table = _table(("point", "layers", "seen"), ("rows", "shape", "dtype", "size"))
    groups: dict[tuple[Any, ...], list[PointSummary]] = {}
    for point in summary.points:
        suffix = _LAYER.sub("layers.*.", point.name)
        key = (suffix, point.how, point.reason, point.rows, point.dtype, point.shape)
        groups.setdefault(key, []).append(point)
    for (suffix, how, _, rows, dtype, shape), points in groups.items():
        layers = [int(m[1]) for p in points if (m := _LAYER.match(p.name))]
        table.add(
            suffix,
            _ranges(layers),
            how.replace("_", " "),
            f"{rows:,}",
            "-" if shape is None else str(list(shape)),
            _dtype(dtype),
            size(sum(p.bytes for p in points)),
        )
    console.print()
    table.print(console)
    reasons = Counter(p.reason for p in summary.points if p.how == "not_observable" and p.reason)
    for reason, number in reasons.items():
        line(console, f"{count(number, 'point')} not observable: {reason}", 0, hang=2)


def _ranges(numbers: Iterable[int]) -> str:
    """Write sorted layer numbers as ``0-3, 7``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _dtype(name: str | None) -> str:
    return "-" if name is None else name.lower()


def _table(words: Sequence[str], figures: Sequence[str]) -> Table:
    columns = [Column(head, "words") for head in words] + [Column(head) for head in figures]
    return Table(columns, heads="bold")
