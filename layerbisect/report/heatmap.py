"""A measure by layer and token, whose cells open the token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerbisect.bisect.token_report import Heatmap
from layerbisect.bisect.verdict import Verdict
from layerbisect.report.blocks import HeatmapBlock, Section
from layerbisect.report.palette import SKY, figure, label
from layerbisect.report.token_text import TokenText
from layerbisect.wording import count

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_TICKS = 10
_NAME = 12
_SCORE = 7
"""Significant digits of a log-prob, as many as a report has."""
_ZERO = 0.06
"""Part of the colour scale that stands for 0, below all others."""
_LEAST = 0.05
"""This part of the cells, the smallest, has the colour of the least: a few tokens that chance to
agree would else take up half of the scale."""

_WHAT = {
    "carried gap": "how far apart the log-probs are that a common tail reads out of both states",
    "stream": "how far apart the two residual streams are, relative to their size",
}


def heatmap_section(verdict: Verdict) -> Section | None:
    """The heatmaps of a verdict's tokens; the carried gap first, which is in nat."""
    tokens = verdict.tokens
    if tokens is None:
        return None
    heatmaps = tuple(
        sorted((h for h in tokens.heatmaps if h.columns), key=lambda h: h.measure != "carried gap")
    )
    if not heatmaps:
        return None
    lead = (
        "Each column is a token's row, each line a layer boundary. A click on a cell, Enter in the "
        "heatmap, or the form below it opens the token."
    )
    title = "By layer and token"
    block = HeatmapBlock("heatmap", title, _reading(heatmaps), heatmaps, tokens, verdict.labels)
    return Section("tokens", "Layer by token", lead, (block,))


def heatmap_data(block: HeatmapBlock, text: TokenText | None) -> dict[str, Any]:
    """What the page's script needs of a heatmap block beside its figure, as JSON wants it.

    ``columns`` are [sequence, start, stop], and ``worst`` counts from a column's start. ``text``
    has what is shown of each token by ID, and is None without a tokenizer.
    """
    named = {one.name: number for number, one in enumerate(block.tokens.sequences)}
    for heatmap in block.heatmaps:
        for column in heatmap.columns:
            named.setdefault(column.sequence, len(named))
    sequences: list[dict[str, Any]] = [
        {"name": name, "start": 0, "tokens": [], "first": [], "second": []} for name in named
    ]
    for one in block.tokens.sequences:
        sequences[named[one.name]] = {
            "name": one.name,
            "start": one.start,
            "tokens": list(one.tokens),
            "first": [_short(value, _SCORE) for value in one.first],
            "second": [_short(value, _SCORE) for value in one.second],
        }
    used = {token for one in block.tokens.sequences for token in one.tokens}
    shown = None
    if text is not None:
        shown = {str(token): text.text(token) or f"<token {token}>" for token in sorted(used)}
    return {
        "labels": list(block.labels),
        "sequences": sequences,
        "text": shown,
        "heatmaps": [
            {
                "measure": one.measure,
                "unit": one.unit,
                "boundaries": list(one.boundaries),
                "columns": [[named[c.sequence], c.start, c.stop] for c in one.columns],
                "values": [[_short(value, 3) for value in row] for row in one.values],
                "worst": [
                    [at - column.start for at, column in zip(row, one.columns, strict=True)]
                    for row in one.worst
                ],
            }
            for one in block.heatmaps
        ],
    }


def heatmap_figure(block: HeatmapBlock) -> Figure:
    """The figure of a heatmap block, a trace each measure, the first one shown.

    The traces have no values: the page's script takes them from :func:`heatmap_data`, which holds
    them once, and puts their logarithms here, or ``meta.zero`` for 0 and ``meta.least`` for less
    than that.
    """
    made = figure(_axis(block.heatmaps[0]), "layer boundary (the input of layer ...)")
    for number, one in enumerate(block.heatmaps):
        low, high = _decades(one)
        zero = low - (high - low) * _ZERO / (1 - _ZERO)
        ticks = [float(tick) for tick in range(math.ceil(low), math.floor(high) + 1)]
        names = [f"{10.0**tick:g}" for tick in ticks]
        if len(ticks) < 2:
            ticks, names = [low, high], [f"{10**low:.2g}", f"{10**high:.2g}"]
        if _has_zero(one):
            ticks, names = [(zero + low) / 2, *ticks], ["0", *names]
        unit = "relative to its size" if one.unit == "relative" else one.unit
        made.add_heatmap(
            x=list(range(len(one.columns))),
            y=list(one.boundaries),
            zmin=zero if _has_zero(one) else low,
            zmax=high,
            colorscale=_colours(_has_zero(one)),
            visible=number == 0,
            meta={"zero": (zero + low) / 2, "least": low, "axis": _axis(one), "ticks": _ticks(one)},
            colorbar={
                "title": {"text": f"{one.measure},<br>{label(unit)}"},
                "tickvals": ticks,
                "ticktext": names,
                "thickness": 14,
            },
            hovertemplate="%{customdata}<extra></extra>",
        )
    made.update_xaxes(showgrid=False, constrain="domain", **_ticks(block.heatmaps[0]))
    made.update_yaxes(showgrid=False, tickformat="d")
    made.update_layout(margin={"l": 64, "r": 8, "t": 8, "b": 56})
    return made


def _axis(heatmap: Heatmap) -> str:
    width = max(column.stop - column.start for column in heatmap.columns)
    several = len({column.sequence for column in heatmap.columns}) > 1
    said = "token read, sequence after sequence" if several else "position of the token read"
    return f"{said} (up to {width} a column)" if width > 1 else said


def _ticks(heatmap: Heatmap) -> dict[str, Any]:
    columns = heatmap.columns
    starts = [
        number
        for number, column in enumerate(columns)
        if not number or column.sequence != columns[number - 1].sequence
    ]
    if len(starts) == 1:
        step = max(1, math.ceil(len(columns) / _TICKS))
        kept = list(range(0, len(columns), step))
        return {"tickvals": kept, "ticktext": [f"{columns[n].start:,}" for n in kept]}
    kept = []
    for start in starts:
        if not kept or start - kept[-1] >= len(columns) / _TICKS:
            kept.append(start)
    names = [_name(columns[number].sequence) for number in kept]
    return {"tickvals": kept, "ticktext": names, "tickangle": 0}


def _name(sequence: str) -> str:
    short = sequence if len(sequence) <= _NAME else f"...{sequence[-_NAME + 3 :]}"
    return label(short)


def _colours(zero: bool) -> list[tuple[float, str]]:
    from plotly.colors import sequential

    steps = sequential.Cividis
    low = _ZERO if zero else 0.0
    scale = [
        (low + (1 - low) * number / (len(steps) - 1), colour) for number, colour in enumerate(steps)
    ]
    return [(0.0, SKY), (low, SKY), *scale] if zero else scale


def _finite(heatmap: Heatmap) -> list[float]:
    return [value for row in heatmap.values for value in row if value is not None]


def _has_zero(heatmap: Heatmap) -> bool:
    return any(value == 0 for value in _finite(heatmap))


def _decades(heatmap: Heatmap) -> tuple[float, float]:
    """Logarithms of the least and the largest value that colours tell apart."""
    positive = sorted(value for value in _finite(heatmap) if value > 0)
    if not positive:
        return -1.0, 0.0
    high = math.log10(positive[-1])
    low = math.log10(positive[int(len(positive) * _LEAST)])
    return (low, high) if high > low else (high - 1, high)


def _reading(heatmaps: Sequence[Heatmap]) -> str:
    said = [_largest_words(one) for one in heatmaps]
    cells = [value for one in heatmaps for row in one.values for value in row]
    if any(value == 0 for value in cells) and any(cells):
        said.append("Light blue is 0: the sides are the same there.")
    if None in cells:
        said.append("What was not measured is left blank.")
    if any(one.worst for one in heatmaps):
        width = max(column.stop - column.start for one in heatmaps for column in one.columns)
        said.append(f"A column stands for up to {count(width, 'row')} and shows their largest.")
    left_out = max(one.left_out for one in heatmaps)
    if left_out:
        said.append(
            f"{count(left_out, 'row')} of further sequences have no column; none of them is the "
            "largest at any boundary."
        )
    return " ".join(said)


def _largest_words(heatmap: Heatmap) -> str:
    said = f"{heatmap.measure.capitalize()}: {_WHAT[heatmap.measure]}."
    found = [
        (value, line, column)
        for line, row in enumerate(heatmap.values)
        for column, value in enumerate(row)
        if value is not None
    ]
    largest, line, at = max(found, default=(None, 0, 0))
    if largest is None:
        return f"{said} Nothing was measured."
    if largest == 0:
        return f"{said} It is 0 everywhere that was measured."
    column = heatmap.columns[at]
    position = heatmap.worst[line][at] if heatmap.worst else column.start
    unit = "of its size" if heatmap.unit == "relative" else heatmap.unit
    return (
        f"{said} Its largest is {largest:.3g} {unit}, into layer {heatmap.boundaries[line]}, where "
        f"position {position:,} of {column.sequence} was read."
    )


def _short(value: float | None, digits: int) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) else rounded
