"""Charts of A, B and C by response position, with the first token apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from layerbisect.bisect.scores.report import PairReport, PositionGap, ScoreReport
from layerbisect.report.blocks import Cell, Chart, Table
from layerbisect.report.palette import DASHES, FLOOR, GREY, MARKERS, SERIES, figure, label
from layerbisect.report.score_readings import position_reading, signed_reading
from layerbisect.score_words import exact, positions
from layerbisect.wording import nat

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_FIRST = "first token"
_APART = 1.5
"""Where positions from 1 on begin on an axis that has the first token at 0."""
_RANGES = 9
"""So many ranges of positions are written out below the axis; of more, where they begin."""

Bins = Sequence[tuple[int, int]]


def position_charts(scores: ScoreReport) -> tuple[Chart, ...]:
    """The mean absolute gap and the signed one of each pair by response position."""
    bins = sorted({(gap.start, gap.stop) for pair in scores.pairs for gap in pair.by_position})
    if not bins:
        return ()
    return (
        Chart(
            "scores-position",
            "Mean absolute gap by response position",
            position_reading(scores.pairs, scores.tolerance, scores.floors),
            _by_position(scores, bins, lambda gap: gap.mae, signed=False),
            _position_table("Mean absolute gap, nat", scores.pairs, bins, lambda gap: gap.mae),
        ),
        Chart(
            "scores-position-signed",
            "Signed mean gap by response position",
            signed_reading(scores.pairs),
            _by_position(scores, bins, lambda gap: gap.signed_mean, signed=True),
            _position_table("Signed mean gap, nat", scores.pairs, bins, lambda g: g.signed_mean),
        ),
    )


def _by_position(
    scores: ScoreReport, bins: Bins, value: Callable[[PositionGap], float], *, signed: bool
) -> Figure:
    apart = bins[0] == (0, 1)
    at = {one: n + (_APART - 1 if apart and n else 0) for n, one in enumerate(bins)}
    long = len(bins) > _RANGES
    axis = "response position" + (", each from here up to the next" if long else "")
    made = figure(axis, f"{'signed' if signed else 'absolute'} mean, nat")
    ends = (-0.5, at[bins[-1]] + 0.5)
    tolerance = scores.tolerance
    _band(made, ends, -tolerance if signed else 0.0, tolerance, f"accepted: {tolerance:g} nat")
    found = [value(gap) for pair in scores.pairs for gap in pair.by_position]
    floor = max(scores.floors.values(), default=0.0)
    if floor > 0:
        for number, height in enumerate((floor, -floor) if signed else (floor,)):
            made.add_scatter(
                name=f"repeats differ by up to {nat(floor)} nat",
                x=ends,
                y=[height, height],
                mode="lines",
                line={"color": GREY, "dash": "dot", "width": 1},
                hoverinfo="skip",
                showlegend=not number,
            )
    for number, pair in enumerate(scores.pairs):
        _line(made, pair, at, value, number)
    if apart and len(bins) > 1:
        made.add_shape(
            type="line",
            x0=_APART / 2,
            x1=_APART / 2,
            yref="paper",
            y0=0,
            y1=1,
            line={"color": GREY, "dash": "dot", "width": 1},
        )
    ticks = [f"{start:,}" if long else positions(start, stop) for start, stop in bins]
    ticks[0] = _FIRST if apart else ticks[0]
    made.update_xaxes(tickvals=[at[one] for one in bins], ticktext=ticks, range=ends)
    high = max(*found, tolerance, floor)
    low = min(*found, -tolerance, -floor) if signed else 0.0
    spare = 0.06 * (high - low)
    made.update_yaxes(tickformat="~g", range=[low - spare, high + spare])
    return made


def _band(made: Figure, ends: tuple[float, float], low: float, high: float, name: str) -> None:
    left, right = ends
    made.add_scatter(
        name=name,
        x=[left, right, right, left],
        y=[low, low, high, high],
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=FLOOR,
        hoverinfo="skip",
    )


def _line(
    made: Figure,
    pair: PairReport,
    at: dict[tuple[int, int], float],
    value: Callable[[PositionGap], float],
    number: int,
) -> None:
    x: list[float | None] = []
    y: list[float | None] = []
    told: list[tuple[str, int]] = []
    for gap in pair.by_position:
        x.append(at[gap.start, gap.stop])
        y.append(value(gap))
        told.append((positions(gap.start, gap.stop), gap.tokens))
        if (gap.start, gap.stop) == (0, 1):
            # the first token comes from another forward than the others: no line joins them
            x.append(None)
            y.append(None)
            told.append(("", 0))
    look = number % len(SERIES)
    # pairs that share a column often lie on each other: each marker is seen around the next
    size = max(14 - 4 * look, 6)
    made.add_scatter(
        name=label(pair.name),
        x=x,
        y=y,
        mode="lines+markers",
        line={"color": SERIES[look], "dash": DASHES[look], "width": 2},
        marker={"symbol": f"{MARKERS[look]}-open", "size": size, "line": {"width": 2}},
        cliponaxis=False,
        customdata=told,
        hovertemplate="position %{customdata[0]}: %{y:.6g} nat over %{customdata[1]:,} tokens",
    )


def _position_table(
    caption: str,
    pairs: Sequence[PairReport],
    bins: Bins,
    value: Callable[[PositionGap], float],
) -> Table:
    of = [{(gap.start, gap.stop): gap for gap in pair.by_position} for pair in pairs]
    rows = []
    for start, stop in bins:
        here = [gaps.get((start, stop)) for gaps in of]
        tokens = max(gap.tokens for gap in here if gap is not None)
        values = ["-" if gap is None else exact(value(gap)) for gap in here]
        rows.append(
            (
                Cell(_FIRST if (start, stop) == (0, 1) else positions(start, stop)),
                *(Cell(text, number=True) for text in (f"{tokens:,}", *values)),
            )
        )
    return Table(caption, ("position", "tokens", *(pair.name for pair in pairs)), tuple(rows))
