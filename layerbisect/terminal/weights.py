"""Print a comparison of weights for people: the faults, not the tensors, then what was covered."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console

from layerbisect.bisect.weight_diff.report import KINDS, Group, Kind, WeightReport, described
from layerbisect.terminal.table import Column, Table
from layerbisect.terminal.text import STYLES, headline_line, line, next_command, title
from layerbisect.terminal.verdict import side_words
from layerbisect.wording import count, size

_ADJECTIVES: frozenset[Kind] = frozenset(
    {"not loaded", "missing", "stale", "swapped", "permuted", "transposed", "scaled"}
)
_EVIDENCE = 3
"""So many lines of evidence a fault are shown where not all are asked for."""


def headline(report: WeightReport) -> str:
    """Say the result in one sentence."""
    groups = report.groups
    if not groups:
        said = report.reasons[0] if report.reasons else "no reason was given"
        return f"{report.status}: {said}"
    first = groups[0]
    more = f"; and {count(len(groups) - 1, 'more fault')}" if len(groups) > 1 else ""
    number = count(len(first.names), "tensor")
    if first.side == "unknown":
        verb = "differs" if len(first.names) == 1 else "differ"
        said = f"{number} {verb} ({first.kind}; which side is off is not known)"
    elif first.kind in _ADJECTIVES:
        said = f"{number} {first.kind} {side_words(first.side)}"
    else:
        said = f"{number} off {side_words(first.side)} ({first.kind})"
    return f"{report.status}: {said}: {first.what}{more}"


def render_weights(report: WeightReport, console: Console, *, verbose: bool = False) -> None:
    """Print ``report``; ``verbose`` names every tensor that differs, and all evidence."""
    headline_line(console, headline(report), STYLES[report.status])
    for reason in report.reasons[0 if report.groups else 1 :]:
        line(console, reason, 2)
    versions = [f"{label} {version}" for label, version in report.versions.items() if version]
    if versions:
        line(console, f"weight versions: {', '.join(versions)}", 2)
    if report.groups:
        console.print()
        _faults(report.groups, verbose).print(console)
    if verbose and report.findings:
        console.print()
        _tensors(report).print(console)
    if report.ruled_out:
        title(console, "ruled out")
        for out in report.ruled_out:
            line(console, f"{out.hypothesis}: {out.evidence}", 2)
    _coverage(report, console)
    next_command(console, report.next)


def _faults(groups: Sequence[Group], verbose: bool) -> Table:
    figures = (Column("tensors"), Column("difference"), Column("off", "name"))
    table = Table((*figures, Column("how", "words")), keys=3, heads="bold")
    for group in groups:
        lines = [f"{group.kind}: {group.how}", group.what, f"({KINDS[group.kind]})"]
        shown = group.evidence if verbose else group.evidence[:_EVIDENCE]
        lines += [f"- {sentence}" for sentence in shown]
        table.add(f"{len(group.names):,}", _apart(group.difference), group.side, "\n".join(lines))
    return table


def _tensors(report: WeightReport) -> Table:
    of = (Column("difference"), Column("off", "name"), Column("tensor", "name"))
    table = Table((*of, Column("how", "words")), keys=3, heads="bold")
    for one in report.findings:
        where = f" ({one.where})" if one.where else ""
        table.add(_apart(one.difference), one.side, one.name, f"{one.kind}{where}")
    return table


def _apart(difference: float) -> str:
    return f"{difference:.2g}" if math.isfinite(difference) else "-"


def _coverage(report: WeightReport, console: Console) -> None:
    covered = report.coverage
    title(console, "coverage")
    parts = [f"{covered.same:,} equal"]
    if covered.cast:
        parts.append(f"{covered.cast:,} equal but for the dtype")
    if covered.quantised:
        parts.append(f"{covered.quantised:,} equal but for the rounding of quantisation")
    alone = {name for names in covered.only.values() for name in names}
    parts.append(f"{len({one.name for one in report.findings} - alone):,} different")
    line(
        console,
        f"{count(covered.tensors, 'tensor')} compared ({size(covered.bytes)} in "
        f"{count(covered.shards, 'part')}): {', '.join(parts)}",
        2,
    )
    if covered.sampled:
        line(
            console,
            f"{count(covered.sampled, 'tensor')} by digest alone: how they differ is judged from "
            "samples",
            2,
        )
    said = {one.name for one in report.findings} | set(covered.not_compared)
    for label, held in covered.only.items():
        names = [name for name in held if name not in said]
        if names:
            line(console, f"{count(len(names), 'tensor')} on {label} alone: {described(names)}", 2)
    reasons: dict[str, list[str]] = {}
    for name, why in covered.not_compared.items():
        reasons.setdefault(why, []).append(name)
    for why, names_of in reasons.items():
        if any(why in reason for reason in report.reasons):
            continue
        what = f"{count(len(names_of), 'tensor')}, {described(names_of)}"
        line(console, f"not compared: {what}: {why}", 2)
    for note in covered.notes:
        line(console, note, 2)
