"""The gap carried from layer to layer, and what each layer adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerbisect.bisect.verdict import Verdict
from layerbisect.report.blocks import Cell, Chart, Facts, Section, Table
from layerbisect.report.palette import BLUE, FLOOR, GREEN, GREY, SKY, figure, label
from layerbisect.report.sides import side_colour
from layerbisect.terminal.layers import SHARE, step_share, whole_gap
from layerbisect.terminal.verdict import side_words
from layerbisect.wording import nat, percent

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_TITLE = "Where the gap grows"
_MOST = 0.5
"""A step with at least this share of the gap makes most of it."""
_LISTED = 5
"""So many steps at most are named in a sentence."""
_LEVELS = 4
"""Levels up to so many times the largest carried gap are drawn."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the gap does between two probed boundaries (nat): over layers ``first`` to ``last``.

    ``share`` is of the squared gap, None where there is no gap to have a share of.
    """

    first: int
    last: int
    before: float
    after: float
    share: float | None

    @property
    def name(self) -> str:
        """The layers in words."""
        alone = self.first == self.last
        return f"layer {self.first}" if alone else f"layers {self.first} to {self.last}"


def carried_section(verdict: Verdict) -> Section | None:
    """The carried gap by layer boundary, and each layer's share of the squared gap."""
    if not verdict.layers:
        return None
    lead = (
        "From each layer boundary on, both sides' states run through one common tail, and the "
        "log-probs that it ends with are compared. That carried gap is 0 where the states are the "
        "same, and a step in it is what a layer contributed."
    )
    probed = _probed(verdict)
    if len(probed) < 2:
        said = (
            "No layer boundary was probed on both sides, so no layer has a share. Captures that "
            "hold the layers' inputs (points `coarse`) can be probed."
        )
        return Section("carried", _TITLE, lead, (Facts((("carried gap", said),)),))
    whole = whole_gap(verdict)
    floor = verdict.probe.floor if verdict.probe is not None else 0.0
    steps = _steps(probed, whole, floor)
    blocks = [_carried_chart(verdict, probed, steps, whole, floor)]
    if whole:
        blocks.append(_share_chart(verdict, steps, probed[-1], whole))
    return Section("carried", _TITLE, lead, tuple(blocks))


def _probed(verdict: Verdict) -> list[tuple[int, float]]:
    """Boundaries that were probed, and the gap carried there (nat)."""
    found = {e.layer: e.carried_in for e in verdict.layers}
    found |= {e.layer + 1: e.carried_out for e in verdict.layers if e.carried_out is not None}
    return sorted((boundary, gap) for boundary, gap in found.items() if gap is not None)


def _steps(
    probed: Sequence[tuple[int, float]], whole: float | None, floor: float
) -> tuple[Step, ...]:
    return tuple(
        Step(
            start,
            stop - 1,
            before,
            after,
            step_share(before, after, whole, floor) if whole else None,
        )
        for (start, before), (stop, after) in zip(probed[:-1], probed[1:], strict=True)
    )


def _after(last: tuple[int, float], whole: float) -> float:
    return max(1 - (last[1] / whole) ** 2, 0.0)


def _carried_chart(
    verdict: Verdict,
    probed: Sequence[tuple[int, float]],
    steps: Sequence[Step],
    whole: float | None,
    floor: float,
) -> Chart:
    made = figure("layer boundary (the input of layer ...)", "carried gap, nat")
    made.add_scatter(
        name="carried gap",
        x=[boundary for boundary, _ in probed],
        y=[gap for _, gap in probed],
        mode="lines+markers",
        line={"color": BLUE},
        marker={"symbol": "circle", "size": 7},
        hovertemplate="into layer %{x}: %{y:.4g} nat<extra></extra>",
        showlegend=True,
    )
    budget = verdict.rounding_budget
    # a level far above would flatten the line
    top = _LEVELS * max(gap for _, gap in probed)
    if whole and whole <= top:
        _level(made, whole, "whole gap", GREY, "solid")
    if budget is not None and 0 < budget.predicted_gap <= top:
        _level(made, budget.predicted_gap, "rounding predicts for the whole gap", GREEN, "dash")
    if floor > 0:
        made.add_shape(
            type="rect", xref="paper", x0=0, x1=1, y0=0, y1=floor, fillcolor=FLOOR,
            line_width=0, layer="below", name="floor: the tail's own rounding", showlegend=True,
        )  # fmt: skip
    _mark_culprits(made, verdict)
    made.update_yaxes(rangemode="tozero")
    convicted = sorted({c.layer for c in verdict.culprits if c.layer is not None})
    reading = [_largest_words(steps, convicted), *_convicted_words(steps, convicted)]
    if whole:
        rest = _after(probed[-1], whole)
        said = f"; what follows it adds {percent(rest)} of the squared gap" if rest >= SHARE else ""
        reading.append(f"The last boundary carries {nat(probed[-1][1])} of {nat(whole)} nat{said}.")
    if floor > 0:
        reading.append(f"Up to {nat(floor)} nat, the grey band, may be the tail's own rounding.")
    if len(probed) <= max(stop for stop, _ in probed):
        reading.append(
            f"Only {len(probed)} boundaries were probed, those with a point; between them the line "
            "is no measurement."
        )
    rows = tuple(
        (Cell(str(boundary), number=True), Cell(nat(gap), number=True)) for boundary, gap in probed
    )
    table = Table("Carried gap by layer boundary", ("input of layer", "carried gap, nat"), rows)
    title = "Gap carried into each layer"
    return Chart("carried-gap", title, " ".join(reading), made, table, 360)


def _level(made: Figure, value: float, name: str, colour: str, dash: str) -> None:
    made.add_shape(
        type="line", xref="paper", x0=0, x1=1, y0=value, y1=value, name=name, showlegend=True,
        line={"color": colour, "dash": dash, "width": 1.5},
    )  # fmt: skip


def _mark_culprits(made: Figure, verdict: Verdict) -> None:
    seen = set()
    for culprit in verdict.culprits:
        if culprit.layer is None:
            continue
        colour = side_colour(verdict.labels, culprit.side)
        made.add_shape(
            type="rect", yref="paper", x0=culprit.layer, x1=culprit.layer + 1, y0=0, y1=1,
            fillcolor=colour, opacity=0.2, line={"color": colour, "width": 1}, layer="below",
            name=label(f"convicted, {side_words(culprit.side)}"),
            showlegend=culprit.side not in seen,
        )  # fmt: skip
        seen.add(culprit.side)


def _largest(steps: Sequence[Step]) -> Step | None:
    rising = [step for step in steps if step.after > step.before]
    return max(rising, key=lambda step: step.after**2 - step.before**2, default=None)


def _largest_words(steps: Sequence[Step], convicted: Sequence[int]) -> str:
    largest = _largest(steps)
    if largest is None:
        return "The carried gap does not grow over any layer."
    said = f"The largest step is over {largest.name}, from {nat(largest.before)} to "
    said += f"{nat(largest.after)} nat"
    if largest.share is None:
        return f"{said}."
    said += f": {percent(largest.share)} of the squared gap."
    if any(largest.first <= layer <= largest.last for layer in convicted):
        said += " It is convicted." if largest.first == largest.last else " It has a convicted one."
    if largest.share < _MOST:
        said += " No single step makes most of it."
    return said


def _convicted_words(steps: Sequence[Step], convicted: Sequence[int]) -> list[str]:
    said = []
    for layer in convicted:
        step = next((one for one in steps if one.first <= layer <= one.last), None)
        if step is not None and step is _largest(steps):
            continue
        if step is None or step.share is None:
            said.append(f"Layer {layer} is convicted; the boundaries around it were not probed.")
        else:
            said.append(f"The step over {step.name}, convicted, is {percent(step.share)}.")
    return said


def _share_chart(
    verdict: Verdict, steps: Sequence[Step], last: tuple[int, float], whole: float
) -> Chart:
    bars = [(step.name, step.first, step.last, step.share or 0.0) for step in steps]
    bars.append(("after the last probed boundary", last[0], last[0], _after(last, whole)))
    made = figure("layer", "share of the squared gap, %")
    made.update_layout(barmode="overlay", hovermode="closest")
    guilty = {c.layer: c.side for c in verdict.culprits if c.layer is not None}
    groups: dict[tuple[str, str], list[tuple[str, int, int, float]]] = {}
    for number, bar in enumerate(bars):
        _, first, final, _ = bar
        side = next((guilty[n] for n in range(first, final + 1) if n in guilty), None)
        if number == len(bars) - 1:
            group = ("final norm and head", SKY)
        elif side is not None:
            group = (f"convicted, {side_words(side)}", side_colour(verdict.labels, side))
        else:
            group = ("other layers", GREY)
        groups.setdefault(group, []).append(bar)
    for (name, colour), members in groups.items():
        made.add_bar(
            name=label(name),
            x=[(first + final) / 2 for _, first, final, _ in members],
            y=[share * 100 for *_, share in members],
            width=[final - first + 0.8 for _, first, final, _ in members],
            marker={"color": colour, "pattern": {"shape": "/" if "convicted" in name else ""}},
            customdata=[said for said, *_ in members],
            hovertemplate="%{customdata}: %{y:.2g} %<extra></extra>",
            showlegend=True,
        )
    reading = _share_words([(said, share) for said, _, _, share in bars])
    rows = tuple(
        (Cell(said), Cell(percent(share), number=True, strong=share >= SHARE))
        for said, _, _, share in bars
    )
    table = Table("Share of the squared gap by layer", ("step", "share"), rows)
    return Chart("layer-shares", "What each layer adds", reading, made, table, 280)


def _share_words(bars: Sequence[tuple[str, float]]) -> str:
    loud = [bar for bar in bars if bar[1] >= SHARE]
    first = max(bars, key=lambda bar: bar[1])
    if not loud:
        said = f"No step has as much as {percent(SHARE)} of the squared gap"
    elif len(loud) <= _LISTED:
        named = ", ".join(f"{name} ({percent(share)})" for name, share in loud)
        said = f"At least {percent(SHARE)} of the squared gap each: {named}"
    else:
        said = (
            f"{len(loud)} of {len(bars)} steps have at least {percent(SHARE)} of the squared gap; "
            f"the largest is {first[0]}, with {percent(first[1])}"
        )
    said += ". Independent errors add in squares, and so do these shares."
    if any(share <= -SHARE for _, share in bars):
        said += " A step below 0 took away from what earlier layers had brought."
    return said
