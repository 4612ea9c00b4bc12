"""Tables that fit: bars get shorter first, then words fold, then columns go below; never figures.

A table has as many columns as its numbers need, and a terminal as many as it has. What is cut from
a figure is lost, so where a row does not fit the table is printed in parts, each with the columns
that say what a row is of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from layerbisect.wording import bar

_JOINTS = "-._/,:"
_BEGUN = re.compile(r"[->]? *")
_WORDS, _BAR = 16, 4
"""Words fold to no less than this, and the marks of a bar are at least so many."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A cell: a figure, and after it a bar as long as there is room for, at most ``longest``."""

    figure: str
    value: float | None
    largest: float
    mark: str
    longest: int

    def drawn(self, width: int) -> Text:
        """Draw it in ``width`` columns."""
        marks = min(width - cell_len(self.figure), self.longest)
        return Text.assemble(self.figure, (bar(self.value, self.largest, marks, self.mark), "cyan"))


Cell = str | Bar


@dataclass(frozen=True, slots=True)
class Column:
    """What is in a column: figures to the right, or words, names and bars to the left.

    Words may be folded. Names are looked for and copied: they stay whole, as figures do.
    """

    head: str
    kind: Literal["figure", "words", "name", "bar"] = "figure"


class Table:
    """Rows of cells under heads; the first ``keys`` columns say what a row is of."""

    def __init__(self, columns: Sequence[Column], *, keys: int = 1, heads: str = "") -> None:
        self.columns = tuple(columns)
        self.keys = keys
        self.heads = heads
        self._rows: list[tuple[tuple[Cell, ...], str]] = []

    def add(self, *cells: Cell, style: str = "") -> None:
        """Add a row, a cell a column."""
        self._rows.append((cells, style))

    def print(self, console: Console, indent: int = 0) -> None:
        """Print it at most as wide as ``console`` is, with ``indent`` blanks before every line."""
        room = max(console.width - indent, 1)
        for number, (part, widths, gap) in enumerate(self._parts(room)):
            if number:
                console.print()
            console.print(Padding(self._drawn(part, widths, gap), (0, 0, 0, indent), expand=False))

    def _parts(self, room: int) -> Iterator[tuple[list[int], list[int], int]]:
        """Yield the columns of each part, their widths and the gap between them."""
        every = list(range(len(self.columns)))
        fitted = self._fitted(every, room)
        if fitted is not None:
            yield every, *fitted
            return
        keys, rest = every[: self.keys], every[self.keys :]
        while rest:
            taken = len(rest)
            while taken > 1 and self._fitted(keys + rest[:taken], room) is None:
                taken -= 1
            part, rest = keys + rest[:taken], rest[taken:]
            widths, gap = self._fitted(part, room) or self._crammed(part, room)
            yield part, widths, gap

    def _fitted(self, part: Sequence[int], room: int) -> tuple[list[int], int] | None:
        """Give columns their widths and gap, or None where they do not fit beside one another."""
        whole = [self._width(at) for at in part]
        bars = [self._least(at, bars=True) for at in part]
        least = [self._least(at, bars=True, words=True) for at in part]
        for floors, gap in ((bars, 2), (bars, 1), (least, 2), (least, 1)):
            left = room - gap * (len(part) - 1)
            if sum(floors) <= left:
                # of bars and words it is the bars that give way first
                return _squeezed(_squeezed(whole, bars, left), floors, left), gap
        return None

    def _crammed(self, part: Sequence[int], room: int) -> tuple[list[int], int]:
        """Fold even figures: no room is left for one beside what its row is of."""
        whole = [self._least(at, bars=True, words=True) for at in part]
        return _squeezed(whole, [1] * len(part), room - (len(part) - 1)), 1

    def _width(self, at: int) -> int:
        cells = (
            cell_len(cell.figure) + cell.longest if isinstance(cell, Bar) else _longest(cell)
            for cell in self._cells(at)
        )
        return max(_longest(self.columns[at].head), *cells, 0)

    def _least(self, at: int, *, bars: bool = False, words: bool = False) -> int:
        column, whole = self.columns[at], self._width(at)
        if column.kind == "bar" and bars:
            figures = (cell_len(c.figure) for c in self._cells(at) if isinstance(c, Bar))
            return min(whole, max(_longest(column.head), max(figures, default=0) + _BAR))
        if column.kind == "words" and words:
            return min(whole, max(_longest(column.head), _WORDS))
        return whole

    def _cells(self, at: int) -> Iterator[Cell]:
        return (cells[at] for cells, _ in self._rows)

    def _drawn(self, part: Sequence[int], widths: Sequence[int], gap: int) -> RichTable:
        table = RichTable(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=False)
        for at, width in zip(part, widths, strict=True):
            right = self.columns[at].kind == "figure"
            table.add_column(width=width, justify="right" if right else "left", overflow="fold")
        heads = [self.columns[at].head for at in part]
        if any(heads):
            lines = max(head.count("\n") for head in heads)
            raised = ["\n" * (lines - head.count("\n")) + head for head in heads]
            table.add_row(*(Text(head) for head in raised), style=self.heads)
        for cells, style in self._rows:
            drawn = (
                cell.drawn(width) if isinstance(cell, Bar) else Text(_folded(cell, width))
                for cell, width in zip((cells[at] for at in part), widths, strict=True)
            )
            table.add_row(*drawn, style=style)
        return table


def _longest(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _folded(text: str, width: int) -> str:
    """Break lines at blanks; a name that is longer than a line after a joint, where it has one.

    Lines that begin with a mark or with blanks go on under what follows them.
    """
    lines = []
    for line in text.split("\n"):
        begun = _BEGUN.match(line)
        hang = begun.end() if begun is not None and begun.end() < width else 0
        left = line
        while cell_len(left) > width:
            fits = hang + 1
            while cell_len(left[: fits + 1]) <= width:
                fits += 1
            blank = left.rfind(" ", hang + 1, fits + 1)
            joint = max(left.rfind(sign, hang, fits) for sign in _JOINTS) + 1
            at = blank if blank > 0 else joint or fits
            lines.append(left[:at].rstrip())
            left = " " * hang + left[at:].lstrip()
        lines.append(left)
    return "\n".join(lines)


def _squeezed(widths: Sequence[int], floors: Sequence[int], room: int) -> list[int]:
    """Take from the widest that is above its floor until ``room`` is kept, or all are there."""
    taken = list(widths)
    while sum(taken) > room:
        above = [at for at, width in enumerate(taken) if width > floors[at]]
        if not above:
            break
        taken[max(above, key=lambda at: taken[at])] -= 1
    return taken
