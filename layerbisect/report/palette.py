"""Colours and layout that all charts share.

The colours are Okabe and Ito's, which colour-blind people tell apart (https://jfly.uni-koeln.de/
color/); each line has a dash and a marker of its own as well. Text and grid have no colour here:
the page's style sheet gives them one in light, dark and print.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
AMBER = "#E69F00"
GREY = "#888888"
FLOOR = "rgba(136,136,136,0.25)"
"""Fill of a band in which nothing is beyond rounding."""

SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross")
COLORSCALE = "Cividis"


def figure(x: str, y: str) -> Figure:
    """Make an empty figure whose axes have these titles, units included."""
    from plotly.graph_objects import Figure

    made = Figure()
    made.update_layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 64, "r": 16, "t": 8, "b": 48},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        hovermode="closest",
        xaxis={"title": {"text": x}, "zeroline": False},
        yaxis={"title": {"text": y}, "zeroline": False},
    )
    return made


def label(text: str) -> str:
    """Make text that a user gave safe in a chart, where plotly reads markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def distinct(names: Sequence[str]) -> list[str]:
    """Number names that come again, which would else be one line of a chart."""
    seen: dict[str, int] = {}
    made: list[str] = []
    for name in names:
        told = name
        while told in seen:
            seen[name] += 1
            told = f"{name} ({seen[name]})"
        seen[told] = 1
        made.append(told)
    return made


def named_axis(made: Figure, names: Sequence[str]) -> None:
    """Make the lines of a chart those names, from the top, even if they look like dates."""
    made.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=list(names),
        autorange="reversed",
        automargin=True,
    )
