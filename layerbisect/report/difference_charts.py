"""Charts of signed differences of log-probs: by position, and how they are spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from layerbisect.bisect.scores.report import PositionGap
from layerbisect.bisect.token_report import Distribution
from layerbisect.report.blocks import Cell, Chart, Table
from layerbisect.report.palette import DASHES, FLOOR, MARKERS, SERIES, figure, label
from layerbisect.wording import nat

LOG_FROM = 50.0
"""A chart whose largest value is more than so many times its smallest has a logarithmic axis."""
_ABOUT_ZERO = 0.25
"""Width of the bin about zero, in decades: as wide as the others."""


def by_position_chart(
    id: str,
    title: str,
    series: Mapping[str, Sequence[PositionGap]],
    band: float | None,
    reading: str,
    band_name: str = "floor",
) -> Chart:
    """Mean absolute gap by position, a line for each of ``series`` (by its name).

    ``band`` (nat) is the gap up to which nothing is seen, drawn as a band that the legend calls
    ``band_name``. Positions are in bins, which all series share; a single series has its signed
    mean beside it.
    """
    bins = sorted({(gap.start, gap.stop) for gaps in series.values() for gap in gaps})
    made = figure("position", "mean gap, nat")
    for number, (name, gaps) in enumerate(series.items()):
        look = number % len(SERIES)
        lines = [("mean absolute", [gap.mae for gap in gaps], DASHES[look])]
        if len(series) == 1:
            lines.append(("signed mean", [gap.signed_mean for gap in gaps], "dot"))
        for what, values, dash in lines:
            made.add_scatter(
                name=label(name if len(series) > 1 else what),
                x=[bins.index((gap.start, gap.stop)) for gap in gaps],
                y=values,
                mode="lines+markers",
                line={"color": SERIES[look], "dash": dash},
                marker={"symbol": MARKERS[look] if what == "mean absolute" else "circle-open"},
                customdata=[(_positions(gap.start, gap.stop), gap.tokens) for gap in gaps],
                hovertemplate="positions %{customdata[0]}: %{y:.4g} nat, %{customdata[1]:,} tokens",
                showlegend=True,
            )
    kept = range(0, len(bins), max(1, math.ceil(len(bins) / 16)))
    made.update_xaxes(
        tickvals=list(kept), ticktext=[_positions(*bins[number]) for number in kept], tickangle=0
    )
    sizes = [gap.mae for gaps in series.values() for gap in gaps]
    logarithmic = len(series) > 1 and wide(sizes)
    if logarithmic:
        made.update_yaxes(type="log", dtick=1, tickformat="~g")
    else:
        made.update_yaxes(rangemode="tozero")
    if band:
        made.add_shape(
            type="rect",
            xref="paper",
            x0=0,
            x1=1,
            y0=min(*sizes, band) / 2 if logarithmic else 0,
            y1=band,
            fillcolor=FLOOR,
            line_width=0,
            layer="below",
            name=label(band_name),
            showlegend=True,
        )
    return Chart(id, title, reading, made, _position_table(title, series, bins))


def distribution_chart(
    id: str, title: str, series: Mapping[str, Distribution], reading: str
) -> Chart:
    """How many tokens differ by how much, with sign, for each of ``series`` (by its name).

    Both axes are logarithmic, so that one token far out is seen beside thousands about zero; the
    bin about zero stands between the negative and the positive ones.
    """
    least = min(edge for one in series.values() for edge in one.edges if edge > 0)
    made = figure("difference, nat (logarithmic to both sides)", "tokens")
    seen: list[float] = []
    for number, (name, one) in enumerate(series.items()):
        look = number % len(SERIES)
        bins = _span(one)
        seen += [edge for low, high, _ in bins for edge in (low, high)]
        ends = [(_place(low, least), _place(high, least)) for low, high, _ in bins]
        shared = {
            "name": label(name),
            "x": [(low + high) / 2 for low, high in ends],
            "y": [count for *_, count in bins],
            "customdata": [(nat(low), nat(high)) for low, high, _ in bins],
            "hovertemplate": "%{customdata[0]} to %{customdata[1]} nat: %{y:,} tokens",
        }
        if len(series) == 1:
            widths = [high - low for low, high in ends]
            made.add_bar(**shared, width=widths, marker_color=SERIES[look])
        else:
            line = {"color": SERIES[look], "dash": DASHES[look], "width": 1}
            marker = {"symbol": MARKERS[look], "size": 7}
            made.add_scatter(**shared, mode="lines+markers", line=line, marker=marker)
    low, high = min(seen, default=-least), max(seen, default=least)
    decades = {edge for one in series.values() for edge in one.edges if _is_decade(edge)}
    ticks = [0.0, *sorted(edge for edge in decades if low <= edge <= high and abs(edge) > least)]
    made.update_xaxes(
        tickvals=[_place(tick, least) for tick in ticks],
        ticktext=[f"{tick:+g}" if tick else "0" for tick in ticks],
        tickangle=0,
    )
    most = max((count for one in series.values() for count in one.counts), default=1)
    made.update_yaxes(
        type="log",
        range=[math.log10(0.7), math.log10(1.5 * max(most, 1))],
        tickvals=[step * 10**decade for decade in range(12) for step in (1, 3)],
        tickformat=",",
    )
    return Chart(id, title, reading, made, _distribution_table(title, series))


def wide(sizes: Sequence[float]) -> bool:
    """Whether positive values span so much that a linear axis would hide the small ones."""
    return len(sizes) > 1 and min(sizes) > 0 and max(sizes) > LOG_FROM * min(sizes)


def _filled(one: Distribution) -> list[tuple[float, float, int]]:
    bins = zip(one.edges[:-1], one.edges[1:], one.counts, strict=True)
    return [(low, high, count) for low, high, count in bins if count]


def _span(one: Distribution) -> list[tuple[float, float, int | None]]:
    """All bins from the first with a token to the last; an empty one has None, which breaks a line.

    A logarithmic axis has no place for 0.
    """
    bins = list(zip(one.edges[:-1], one.edges[1:], one.counts, strict=True))
    filled = [number for number, count in enumerate(one.counts) if count]
    kept = bins[filled[0] : filled[-1] + 1] if filled else []
    return [(low, high, count or None) for low, high, count in kept]


def _place(value: float, least: float) -> float:
    """Where a signed difference is on an axis that is logarithmic beyond ``least``."""
    if abs(value) < least:
        return 0.0
    beyond = _ABOUT_ZERO / 2 + math.log10(abs(value) / least)
    return math.copysign(beyond, value)


def _is_decade(edge: float) -> bool:
    return edge != 0 and abs(math.log10(abs(edge)) - round(math.log10(abs(edge)))) < 1e-9


def _positions(start: int, stop: int) -> str:
    return f"{start:,}" if stop - start == 1 else f"{start:,}-{stop - 1:,}"


def _position_table(
    title: str, series: Mapping[str, Sequence[PositionGap]], bins: Sequence[tuple[int, int]]
) -> Table:
    columns = ["positions"]
    for name in series:
        columns += [f"{name}: tokens", "mean absolute, nat", "signed mean, nat"]
    by_bin = {name: {(gap.start, gap.stop): gap for gap in gaps} for name, gaps in series.items()}
    rows = []
    for start, stop in bins:
        row = [Cell(_positions(start, stop))]
        for gaps in by_bin.values():
            gap = gaps.get((start, stop))
            said = (
                ("", "", "")
                if gap is None
                else (f"{gap.tokens:,}", nat(gap.mae), nat(gap.signed_mean))
            )
            row += [Cell(text, number=True) for text in said]
        rows.append(tuple(row))
    return Table(title, tuple(columns), tuple(rows))


def _distribution_table(title: str, series: Mapping[str, Distribution]) -> Table:
    counts: dict[tuple[float, float], dict[str, int]] = {}
    for name, one in series.items():
        for low, high, count in _filled(one):
            counts.setdefault((low, high), {})[name] = count
    rows = tuple(
        tuple(
            Cell(text, number=True)
            for text in (nat(low), nat(high), *(f"{found.get(name, 0):,}" for name in series))
        )
        for (low, high), found in sorted(counts.items())
    )
    return Table(title, ("from, nat", "to, nat", *(f"{name}: tokens" for name in series)), rows)
