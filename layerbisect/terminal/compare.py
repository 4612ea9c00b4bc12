"""Print two runs side by side."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from layerbisect.bisect.scores.side_by_side import Comparison, Row
from layerbisect.terminal.table import Column, Table
from layerbisect.terminal.text import headline_line, line
from layerbisect.wording import count

_MARKS = {True: "within", False: "OUT", None: "-"}


def render_comparison(comparison: Comparison, console: Console) -> None:
    """Print each measure before and after, the control's, and whether it is back in its range."""
    out = [row for row in comparison.rows if row.within is False]
    judged = sum(row.within is not None for row in comparison.rows)
    first = {
        "no control": "no control: nothing can be said to be back in range",
        "too few": "too few prompts to tell whether the run is back in the control's range",
        "out of range": (
            f"out of range: {count(len(out), 'measure')} lie above the control by more than chance"
        ),
        "within": f"within: all {judged} measures that can be judged are in the control's range",
    }[comparison.status]
    headline_line(console, first, "bold red" if out else "bold")
    console.print()
    stepped = any(row.step is not None for row in comparison.rows)
    of = [Column("step")] * stepped + [Column("gap", "name"), Column("measure", "words")]
    figures = [Column(head) for head in ("before", "after", "control", "chance", "")]
    table = Table((*of, *figures), keys=len(of), heads="dim")
    for row in comparison.rows:
        where = ["-" if row.step is None else str(row.step)] * stepped
        chance = "-" if row.chance is None else f"{row.chance:.4f}"
        style = "red" if row.within is False else ""
        values = (_value(row, v) for v in (row.before, row.after, row.control))
        cells = (*where, row.pair, row.measure, *values, chance, _MARKS[row.within])
        table.add(*cells, style=style)
    table.print(console)
    console.print()
    for note in comparison.notes:
        line(console, f"note: {note}", 0, hang=2)
    console.print(
        Text(
            "nat; outliers are prompts with a token beyond the control's largest, which stands for "
            "max; chance is that of a run like the control lying so far above it; out of range is "
            "below 0.01 over the number of measures",
            style="dim",
        )
    )


def _value(row: Row, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if row.measure == "outliers" else f"{value:.6f}"
