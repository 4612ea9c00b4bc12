"""How differences of scores are spread over tokens, with their signs and tails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerbisect.bisect.scores.explain import FEWEST
from layerbisect.bisect.scores.report import PairReport
from layerbisect.bisect.token_report import Distribution
from layerbisect.report.blocks import Cell, Chart, Table
from layerbisect.report.palette import FLOOR, GREY, SERIES, figure, label
from layerbisect.wording import count, nat

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_FAR = 20.0
"""A largest difference of more than so many times the 99th percentile stands alone."""
_BELL = 3.2
"""99th percentile of absolute values over their mean, for a normal distribution about 0."""

_PANEL = 110
_MARGINS = 110
_BETWEEN = 0.06
"""Space between two panels, of the chart's height."""
_ABOUT_ZERO = 0.125
"""Half of the width of the bin about zero, in decades: it is as wide as the others."""


def spread_chart(pairs: Sequence[PairReport], tolerance: float) -> Chart | None:
    """How many tokens differ by how much, signed, one panel a pair; None without any."""
    shown = [(p, p.distribution) for p in pairs if p.distribution and any(p.distribution.counts)]
    if not shown:
        return None
    edges = shown[0][1].edges
    same = [(pair, one) for pair, one in shown if one.edges == edges]
    return Chart(
        "scores-spread",
        "Signed differences of single tokens",
        spread_reading([pair for pair, _ in same]),
        _panels(same, tolerance),
        _spread_table(same),
        height=_MARGINS + _PANEL * len(same),
    )


def spread_reading(pairs: Sequence[PairReport]) -> str:
    """Say of each pair on which side of 0 its tokens lie, and how far out its tail goes."""
    said = " ".join(_spread(p, p.distribution) for p in pairs if p.distribution is not None)
    if "times the mean" in said:
        said += f" A bell curve's 99th percentile is {_BELL} times its mean."
    return said


@dataclass(frozen=True, slots=True)
class _Sides:
    """How many tokens are below 0, about 0, and above."""

    below: int
    about: int
    above: int


def _sides(one: Distribution) -> _Sides:
    below = about = above = 0
    for low, high, number in zip(one.edges[:-1], one.edges[1:], one.counts, strict=True):
        if high <= 0:
            below += number
        elif low >= 0:
            above += number
        else:
            about += number
    return _Sides(below, about, above)


def _spread(pair: PairReport, one: Distribution) -> str:
    sides = _sides(one)
    total = sides.below + sides.about + sides.above
    least = min((edge for edge in one.edges if edge > 0), default=0.0)
    small = f"{least:.9f}".rstrip("0")
    if sides.about == total:
        return f"{pair.name}: all {count(total, 'token')} within {small} nat of 0."
    said = f"{pair.name}: {sides.below:,} of {count(total, 'token')} below 0, {sides.above:,} above"
    said += f", {sides.about:,} within {small} nat of it" if sides.about else ""
    said += f"; largest {nat(pair.gap.max)} nat"
    one_way = max(sides.below, sides.above) >= 0.95 * total
    if total >= FEWEST and one_way:
        return f"{said}: it lies to one side."
    if total >= 10 * FEWEST and pair.gap.max > _FAR * pair.gap.p99:
        return f"{said}, 99th percentile {nat(pair.gap.p99)}: a few tokens lie far out."
    if total >= 10 * FEWEST and pair.gap.mae:
        ratio = pair.gap.p99 / pair.gap.mae
        said += f", 99th percentile {ratio:.1f} times the mean"
        if ratio > 2 * _BELL:
            return f"{said}: a heavy tail."
    return f"{said}."


def _panels(shown: Sequence[tuple[PairReport, Distribution]], tolerance: float) -> Figure:
    edges = shown[0][1].edges
    least = min(edge for edge in edges if edge > 0)
    filled = [number for _, one in shown for number, tokens in enumerate(one.counts) if tokens]
    # the bin about zero and what is accepted are always in sight
    seen = [*(edges[n] for n in filled), *(edges[n + 1] for n in filled), -least, least]
    seen += [-tolerance, tolerance]
    low, high = _place(min(seen), least) - 0.3, _place(max(seen), least) + 0.3
    made = figure("difference, nat (logarithmic to both sides of 0)", "")
    made.update_layout(showlegend=False, bargap=0)
    most = max(max(one.counts) for _, one in shown)
    places = [(_place(a, least), _place(b, least)) for a, b in zip(edges, edges[1:], strict=False)]
    height = (1 - _BETWEEN * (len(shown) - 1)) / len(shown)
    for number, (pair, one) in enumerate(shown):
        panel = "" if number == 0 else str(number + 1)
        top = 1 - number * (height + _BETWEEN)
        look = number % len(SERIES)
        bars = [n for n, tokens in enumerate(one.counts) if tokens]
        made.add_bar(
            name=label(pair.name),
            x=[sum(places[n]) / 2 for n in bars],
            y=[one.counts[n] for n in bars],
            width=[places[n][1] - places[n][0] for n in bars],
            marker={"color": SERIES[look], "line": {"width": 0}},
            customdata=[(nat(edges[n]), nat(edges[n + 1])) for n in bars],
            hovertemplate="%{customdata[0]} to %{customdata[1]} nat: %{y:,} tokens",
            yaxis=f"y{panel}",
        )
        made.update_layout(
            {
                f"yaxis{panel}": {
                    "title": {"text": f"{label(pair.name)}<br>tokens"},
                    "domain": [max(top - height, 0.0), top],
                    "type": "log",
                    # a single token is seen, too: a bar of 1 begins below it
                    "range": [math.log10(0.5), math.log10(most * 1.5)],
                    "dtick": 1,
                    "tickformat": ",",
                    "zeroline": False,
                    "anchor": "x",
                }
            }
        )
    _zero_and_accepted(made, tolerance, least)
    decades = [e for e in edges if abs(e) > least and _decade(e)]
    ticks = [0.0, *(edge for edge in decades if low <= _place(edge, least) <= high)]
    made.update_xaxes(
        tickvals=[_place(tick, least) for tick in ticks],
        ticktext=[f"{tick:+g}" if tick else "0" for tick in ticks],
        tickangle=0,
        range=[low, high],
        anchor="y" if len(shown) == 1 else f"y{len(shown)}",
    )
    return made


def _zero_and_accepted(made: Figure, tolerance: float, least: float) -> None:
    shared = {"yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    ends = {"x0": _place(-tolerance, least), "x1": _place(tolerance, least)}
    made.add_shape(type="rect", fillcolor=FLOOR, line={"width": 0}, **ends, **shared)
    line = {"color": GREY, "dash": "dot", "width": 1}
    made.add_shape(type="line", x0=0, x1=0, line=line, **shared)


def _place(value: float, least: float) -> float:
    """Where a difference lies on an axis that is logarithmic beyond ``least``, in decades."""
    if abs(value) < least:
        return 0.0
    return math.copysign(_ABOUT_ZERO + math.log10(abs(value) / least), value)


def _decade(edge: float) -> bool:
    power = math.log10(abs(edge))
    return abs(power - round(power)) < 1e-9


def _spread_table(shown: Sequence[tuple[PairReport, Distribution]]) -> Table:
    edges = shown[0][1].edges
    rows = tuple(
        tuple(
            Cell(text, number=True)
            for text in (
                nat(edges[n]),
                nat(edges[n + 1]),
                *(f"{one.counts[n]:,}" for _, one in shown),
            )
        )
        for n in range(len(edges) - 1)
        if any(one.counts[n] for _, one in shown)
    )
    names = (f"{pair.name}, tokens" for pair, _ in shown)
    return Table("Tokens by signed difference", ("from, nat", "to, nat", *names), rows)
