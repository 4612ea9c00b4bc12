"""What each operator of either side added on the input that it was itself given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerbisect.bisect.verdict import OperatorError, Verdict
from layerbisect.report.blocks import Cell, Chart, Section, Table
from layerbisect.report.palette import GREY, PURPLE, figure, label
from layerbisect.report.sides import side_colour, side_marker
from layerbisect.wording import count, times

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MARKS = 1000
"""So many operators of a side are drawn; of more, the largest and the convicted."""
_LEAST = 0.1
"""Own errors below this are drawn here: a logarithmic axis has no place for 0."""
_ROWS = 20


def own_error_section(verdict: Verdict) -> Section | None:
    """Own error by layer and operator, for both sides, and a table of the largest."""
    errors = verdict.own_errors or _of_layers(verdict)
    if not errors:
        return None
    lead = (
        "Each operator is recomputed in full precision on the input that its own side captured. "
        "Its error is in units of what a low-precision reference loses there (1x), so it needs no "
        "other engine and says which side is wrong."
    )
    blocks = (_chart(verdict, errors), _table(verdict, errors))
    return Section("own-errors", "Own errors by operator", lead, blocks)


def _of_layers(verdict: Verdict) -> tuple[OperatorError, ...]:
    """Each layer's largest, which is all that a verdict of an earlier version says."""
    guilty = {(culprit.point, culprit.side) for culprit in verdict.culprits}
    return tuple(
        OperatorError(
            point=layer.worst_point.get(side, f"layers.{layer.layer}"),
            layer=layer.layer,
            operator="largest of its layer",
            covers=(),
            side=side,
            rows=0,
            own_error=error,
            floor=math.nan,
            convicted=(layer.worst_point.get(side), side) in guilty,
        )
        for layer in verdict.layers
        for side, error in layer.own_error.items()
    )


def _chart(verdict: Verdict, errors: Sequence[OperatorError]) -> Chart:
    made = figure("layer", "own error, times rounding")
    layers = [error.layer for error in errors if error.layer is not None]
    end = max(layers, default=-1) + 1
    drawn: list[OperatorError] = []
    for number, side in enumerate(verdict.labels):
        found = [e for e in errors if e.side == side and math.isfinite(e.own_error)]
        kept = sorted(found, key=lambda e: (not e.convicted, -e.own_error))[:MARKS]
        drawn += kept
        made.add_scatter(
            name=label(side),
            # side by side, so that neither hides the other
            x=[_across(error, end) + (number - 0.5) * 0.3 for error in kept],
            y=[max(error.own_error, _LEAST) for error in kept],
            mode="markers",
            marker={
                "color": side_colour(verdict.labels, side),
                "symbol": side_marker(verdict.labels, side),
                "size": 7,
                "opacity": 0.75,
            },
            customdata=[
                (label(error.point), label(error.operator), times(error.own_error))
                for error in kept
            ],
            hovertemplate="%{customdata[0]} (%{customdata[1]}): %{customdata[2]}",
        )
    ringed = [error for error in drawn if error.convicted]
    if ringed:
        sides = list(verdict.labels)
        made.add_scatter(
            name=_judged(verdict),
            x=[_across(error, end) + (sides.index(error.side) - 0.5) * 0.3 for error in ringed],
            y=[max(error.own_error, _LEAST) for error in ringed],
            mode="markers",
            marker={"symbol": "circle-open", "size": 16, "line": {"width": 3}, "color": PURPLE},
            hoverinfo="skip",
        )
    made.add_shape(
        type="line", xref="paper", x0=0, x1=1, y0=1, y1=1, showlegend=True, layer="below",
        name="1x: what the low-precision reference loses", line={"color": GREY, "dash": "dash"},
    )  # fmt: skip
    ticks = _ticks([max(error.own_error, _LEAST) for error in drawn])
    made.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}x" for tick in ticks])
    if any(error.layer is None for error in errors):
        _name_ends(made, end, errors)
    reading = _reading(errors)
    if len(drawn) < sum(math.isfinite(error.own_error) for error in errors):
        reading += f" Of {count(len(errors), 'operator')} the largest are drawn."
    if any(error.own_error < _LEAST for error in drawn):
        reading += f" What is below {times(_LEAST)}, such as an exact result, is drawn there."
    title = "Own error of each operator"
    return Chart("own-error", title, reading, made, None, 380)


def _ticks(sizes: Sequence[float]) -> list[float]:
    low, high = (math.log10(size) for size in (min(sizes, default=1), max(sizes, default=1)))
    steps = (1.0,) if high - low > 3 else (1.0, 2.0, 5.0)
    # beyond that there are no floats to write
    decades = range(math.floor(low), min(math.ceil(high), 300) + 1)
    return [step * 10.0**decade for decade in decades for step in steps]


def _across(error: OperatorError, end: int) -> int:
    if error.layer is not None:
        return error.layer
    return -1 if error.operator == "embedding" else end


def _name_ends(made: Figure, end: int, errors: Sequence[OperatorError]) -> None:
    step = max(1, math.ceil(end / 12))
    named = {tick: str(tick) for tick in range(0, end, step)}
    if any(_across(error, end) == -1 for error in errors):
        # room for the word
        named = {-1: "embed"} | {tick: name for tick, name in named.items() if 2 * tick >= step - 2}
    if any(_across(error, end) == end for error in errors):
        named = {tick: name for tick, name in named.items() if tick < end - step / 2}
        named[end] = "head"
    made.update_xaxes(tickvals=list(named), ticktext=list(named.values()))


def _reading(errors: Sequence[OperatorError]) -> str:
    broken = [error for error in errors if not math.isfinite(error.own_error)]
    sound = [error for error in errors if not error.convicted and error not in broken]
    convicted = [error for error in errors if error.convicted]
    largest = max(sound, key=lambda error: error.own_error, default=None)
    others = (
        "" if largest is None else f"{times(largest.own_error)} ({largest.point}, {largest.side})"
    )
    if convicted:
        top = max(convicted, key=lambda error: _size(error))
        said = (
            f"Ringed is what rounding does not explain, {count(len(convicted), 'operator')}: the "
            f"largest is {top.point} on the {top.side} side at {times(top.own_error)}."
        )
        if others:
            said += f" No other is above {others}."
    else:
        said = "Rounding explains every operator here"
        said += f": none is above {others}." if others else "."
    if broken:
        said += f" {count(len(broken), 'operator')} with an error that is not finite is not drawn."
    return said


def _size(error: OperatorError) -> float:
    return error.own_error if math.isfinite(error.own_error) else math.inf


def _table(verdict: Verdict, errors: Sequence[OperatorError]) -> Table:
    convicted = sorted((e for e in errors if e.convicted), key=lambda error: -_size(error))
    largest: dict[tuple[str, str], OperatorError] = {}
    for error in errors:
        key = (error.operator, error.side)
        if key not in largest or _size(error) > _size(largest[key]):
            largest[key] = error
    # both sides of a kind below one another
    kinds = list(dict.fromkeys(operator for operator, _ in largest))
    pairs = sorted(largest, key=lambda key: kinds.index(key[0]))
    shown = list(dict.fromkeys([*convicted[:_ROWS], *(largest[key] for key in pairs)]))
    rows = tuple(
        (
            Cell(error.point, strong=error.convicted),
            Cell(", ".join(error.covers) or error.operator),
            Cell(error.side),
            Cell(times(error.own_error), number=True, strong=error.convicted),
            Cell(times(error.floor), number=True),
            Cell(f"{error.rows:,}" if error.rows else "-", number=True),
            Cell(_judged(verdict) if error.convicted else "rounding"),
        )
        for error in shown
    )
    beyond = "The convicted" if verdict.status == "divergent" else "What is beyond rounding"
    more = f" ({len(convicted):,} in all)" if len(convicted) > _ROWS else ""
    return Table(
        f"{beyond}{more}, and the largest of each kind of operator and side",
        ("point", "operator", "side", "own error", "floor", "rows", "judged"),
        rows,
    )


def _judged(verdict: Verdict) -> str:
    """What is said of an operator that rounding does not explain: not every verdict convicts."""
    return "convicted" if verdict.status == "divergent" else "beyond rounding"
