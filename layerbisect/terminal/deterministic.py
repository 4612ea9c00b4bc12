"""Print what a deterministic mode changes, operator by operator, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from layerbisect.kernels.replay.deterministic import Pair
from layerbisect.kernels.replay.report import Result
from layerbisect.replay_words import varies
from layerbisect.terminal.table import Column, Table
from layerbisect.terminal.text import line, title
from layerbisect.wording import times


def render_pairs(pairs: Sequence[Pair], console: Console) -> None:
    """Print one line an operator and a switch, each cell with the switch off and on."""
    title(console, "deterministic off / on")
    if not pairs:
        line(console, "no implementation of these operators has such a switch", 2)
        return
    heads = ["rows that change\nin a repeat", "in a batch", "in chunks", "error\np95"]
    timed = any(pair.time_ratio is not None for pair in pairs)
    of = [Column("point", "words"), Column("switch", "words")]
    heads += ["time\non / off"] * timed
    table = Table([*of, *(Column(head) for head in heads)], keys=2)
    for pair in pairs:
        cells = [
            _both(pair, lambda one: varies(one.repeats)),
            _both(pair, lambda one: varies(one.batches)),
            _both(pair, lambda one: varies(one.chunks)),
            " / ".join(times(ratio) for ratio in pair.error_ratio),
        ]
        if timed:
            cells.append(times(pair.time_ratio))
        table.add(_short(pair), pair.family, *cells)
    table.print(console, 2)
    line(
        console,
        "same: no bit of any row changes; error as a multiple of what the low-precision reference "
        "loses; - where it did not run, or does not apply",
        2,
    )
    for note in dict.fromkeys(_notes(pairs)):
        line(console, note, 2, hang=2)


def _short(pair: Pair) -> str:
    """Leave out the layer of a point, which the sentences above say."""
    return pair.point.removeprefix(f"layers.{pair.layer}.")


def _both(pair: Pair, cell: Callable[[Result], str]) -> str:
    return " / ".join("-" if one is None else cell(one) for one in (pair.off, pair.on))


def _notes(pairs: Sequence[Pair]) -> list[str]:
    """Say of which parts of a stretch the low-precision reference stood in."""
    ran: list[Result] = [
        one for p in pairs for one in (p.off, p.on) if one is not None and one.state == "ran"
    ]
    return [
        f"{one.name}: {', '.join(one.filled)} by the low-precision reference"
        for one in ran
        if one.filled
    ]
