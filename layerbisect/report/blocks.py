"""What a page's sections are made of: charts, tables and sentences.

Text is plain text everywhere: the page escapes it. Charts hold no text that comes from a model or
a file (plotly reads markup in its labels), but numbers, positions, and names of points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from layerbisect.bisect.token_report import Heatmap, TokenReport


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell.

    ``number`` is set to the right. ``token`` marks text of a token, which is set apart as such.
    ``opens`` is the ``sequence:position`` of the token that a click on it opens, where there is a
    heatmap to open it in.
    """

    text: str
    number: bool = False
    token: bool = False
    opens: str = ""
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table; ``columns`` name units where they have one, such as ``A-B0, nat``."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, the sentence that says what to see in it, and its numbers as a table.

    ``id`` is unique on the page. ``height`` is in pixels. Colours come from `palette`.
    """

    id: str
    title: str
    reading: str
    figure: Figure
    numbers: Table | None = None
    height: int = 320


@dataclass(frozen=True, slots=True)
class HeatmapBlock:
    """A heatmap of layers and tokens whose cells open a token."""

    id: str
    title: str
    reading: str
    heatmaps: tuple[Heatmap, ...]
    tokens: TokenReport
    labels: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Facts:
    """Sentences, each with a word for what it is about, which may be empty."""

    rows: tuple[tuple[str, str], ...]
    title: str = ""


Block = Chart | Table | HeatmapBlock | Facts


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page; ``lead`` says in a sentence what it shows."""

    id: str
    title: str
    lead: str
    blocks: tuple[Block, ...]
