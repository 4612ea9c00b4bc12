"""Charts of one signed difference of log-probs: by position, and how it is spread."""

from __future__ import annotations

import math
from collections.abc import Sequence

from layerbisect.bisect.scores.report import PositionGap
from layerbisect.bisect.token_report import Distribution
from layerbisect.report.blocks import Cell, Chart, Table
from layerbisect.report.palette import BLUE, FLOOR, figure, label
from layerbisect.score_words import positions
from layerbisect.wording import nat

_ABOUT_ZERO = 0.25
"""Width of the bin about zero, in decades: as wide as the others."""


def by_position_chart(
    id: str,
    title: str,
    order: str,
    gaps: Sequence[PositionGap],
    band: float | None,
    reading: str,
    band_name: str,
) -> Chart:
    """Mean absolute and signed mean gap by position; ``order`` says what was subtracted from what.

    ``band`` (nat) is the gap up to which nothing is seen, drawn as a band that the legend calls
    ``band_name``.
    """
    made = figure("position", "mean gap, nat")
    told = [(positions(gap.start, gap.stop), gap.tokens) for gap in gaps]
    lines = (
        ("mean absolute", [gap.mae for gap in gaps], "solid", "circle"),
        ("signed mean", [gap.signed_mean for gap in gaps], "dot", "circle-open"),
    )
    for name, values, dash, symbol in lines:
        made.add_scatter(
            name=name,
            x=list(range(len(gaps))),
            y=values,
            mode="lines+markers",
            line={"color": BLUE, "dash": dash},
            marker={"symbol": symbol},
            customdata=told,
            hovertemplate="positions %{customdata[0]}: %{y:.4g} nat, %{customdata[1]:,} tokens",
            showlegend=True,
        )
    kept = range(0, len(gaps), max(1, math.ceil(len(gaps) / 16)))
    made.update_xaxes(
        tickvals=list(kept), ticktext=[told[number][0] for number in kept], tickangle=0
    )
    made.update_yaxes(rangemode="tozero")
    if band:
        made.add_shape(
            type="rect",
            xref="paper",
            x0=0,
            x1=1,
            y0=0,
            y1=band,
            fillcolor=FLOOR,
            line_width=0,
            layer="below",
            name=label(band_name),
            showlegend=True,
        )
    columns = ("positions", f"{order}: tokens", "mean absolute, nat", "signed mean, nat")
    rows = tuple(
        (
            Cell(place),
            *(Cell(text, number=True) for text in (f"{tokens:,}", nat(g.mae), nat(g.signed_mean))),
        )
        for (place, tokens), g in zip(told, gaps, strict=True)
    )
    return Chart(id, title, reading, made, Table(title, columns, rows))


def distribution_chart(
    id: str, title: str, order: str, spread: Distribution, reading: str
) -> Chart:
    """How many tokens differ by how much, with sign; ``order`` says what was subtracted from what.

    Both axes are logarithmic, so that one token far out is seen beside thousands about zero; the
    bin about zero stands between the negative and the positive ones.
    """
    least = min(edge for edge in spread.edges if edge > 0)
    made = figure("difference, nat (logarithmic to both sides)", "tokens")
    bins = _span(spread)
    ends = [(_place(low, least), _place(high, least)) for low, high, _ in bins]
    made.add_bar(
        name=label(order),
        x=[(low + high) / 2 for low, high in ends],
        # a logarithmic axis has no place for 0
        y=[count or None for *_, count in bins],
        customdata=[(nat(low), nat(high)) for low, high, _ in bins],
        hovertemplate="%{customdata[0]} to %{customdata[1]} nat: %{y:,} tokens",
        width=[high - low for low, high in ends],
        marker_color=BLUE,
    )
    low, high = (bins[0][0], bins[-1][1]) if bins else (-least, least)
    decades = sorted(edge for edge in set(spread.edges) if _is_decade(edge))
    ticks = [0.0, *(edge for edge in decades if low <= edge <= high and abs(edge) > least)]
    made.update_xaxes(
        tickvals=[_place(tick, least) for tick in ticks],
        ticktext=[f"{tick:+g}" if tick else "0" for tick in ticks],
        tickangle=0,
    )
    most = max(spread.counts, default=1)
    made.update_yaxes(
        type="log",
        range=[math.log10(0.7), math.log10(1.5 * max(most, 1))],
        tickvals=[step * 10**decade for decade in range(12) for step in (1, 3)],
        tickformat=",",
    )
    rows = tuple(
        tuple(Cell(text, number=True) for text in (nat(low), nat(high), f"{count:,}"))
        for low, high, count in bins
        if count
    )
    table = Table(title, ("from, nat", "to, nat", f"{order}: tokens"), rows)
    return Chart(id, title, reading, made, table)


def _span(spread: Distribution) -> list[tuple[float, float, int]]:
    """All bins from the first with a token to the last."""
    bins = list(zip(spread.edges[:-1], spread.edges[1:], spread.counts, strict=True))
    filled = [number for number, count in enumerate(spread.counts) if count]
    return bins[filled[0] : filled[-1] + 1] if filled else []


def _place(value: float, least: float) -> float:
    """Where a signed difference is on an axis that is logarithmic beyond ``least``."""
    if abs(value) < least:
        return 0.0
    beyond = _ABOUT_ZERO / 2 + math.log10(abs(value) / least)
    return math.copysign(beyond, value)


def _is_decade(edge: float) -> bool:
    return edge != 0 and abs(math.log10(abs(edge)) - round(math.log10(abs(edge)))) < 1e-9
