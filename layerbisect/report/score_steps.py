"""The gaps among A, B and C over training steps, with the weights that scored."""

from __future__ import annotations

import math
from collections.abc import Sequence

from layerbisect.bisect.scores.report import ScoreReport, StepReport
from layerbisect.report.blocks import Cell, Chart, Section, Table
from layerbisect.report.palette import DASHES, FLOOR, MARKERS, SERIES, figure, label
from layerbisect.score_words import exact
from layerbisect.wording import count, nat

_MOST = 400
"""Steps that are drawn; of more, the worst of neighbouring ones."""
_DIGEST = 12


def steps_section(scores: ScoreReport) -> Section | None:
    """The mean absolute gap of each pair by step; None for a single step."""
    if len(scores.steps) < 2:
        return None
    steps = _worst_of_neighbours(scores.steps)
    left = len(scores.steps) - len(steps)
    lead = f"{count(len(scores.steps), 'step')} were judged one by one."
    if left:
        lead += f" Of neighbouring steps only the worst are shown: {left:,} are left out."
    return Section("scores-steps", "Over steps", lead, (_chart(steps, scores.tolerance),))


def _worst_of_neighbours(steps: Sequence[StepReport]) -> list[StepReport]:
    width = math.ceil(len(steps) / _MOST)
    groups = (steps[start : start + width] for start in range(0, len(steps), width))
    return [max(group, key=_largest) for group in groups]


def _largest(step: StepReport) -> float:
    return max(step.maes.values(), default=0.0)


def _chart(steps: Sequence[StepReport], tolerance: float) -> Chart:
    names = list(dict.fromkeys(name for step in steps for name in step.maes))
    x = [number if step.step is None else step.step for number, step in enumerate(steps)]
    made = figure("training step", "mean absolute gap, nat")
    ends = [x[0] - 0.5, x[-1] + 0.5]
    made.add_scatter(
        name=f"accepted: {tolerance:g} nat",
        x=[*ends, *reversed(ends)],
        y=[0, 0, tolerance, tolerance],
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=FLOOR,
        hoverinfo="skip",
    )
    for number, name in enumerate(names):
        look = number % len(SERIES)
        size = max(14 - 4 * look, 6)
        made.add_scatter(
            name=label(name),
            x=x,
            y=[step.maes.get(name) for step in steps],
            mode="lines+markers",
            line={"color": SERIES[look], "dash": DASHES[look], "width": 2},
            marker={"symbol": f"{MARKERS[look]}-open", "size": size, "line": {"width": 2}},
            cliponaxis=False,
            hovertemplate="step %{x}: %{y:.6g} nat",
        )
    made.update_xaxes(range=ends, tickformat="d")
    if len(x) <= 12:
        made.update_xaxes(tickvals=x)
    high = max(tolerance, *(_largest(step) for step in steps))
    made.update_yaxes(tickformat="~g", range=[-0.06 * high, 1.06 * high])
    return Chart(
        "scores-steps",
        "Mean absolute gap by step",
        _reading(steps, tolerance),
        made,
        _table(steps, names),
    )


def _reading(steps: Sequence[StepReport], tolerance: float) -> str:
    beyond = [number for number, step in enumerate(steps) if _largest(step) > tolerance]
    if not beyond:
        worst = max(steps, key=_largest)
        return (
            f"All steps lie in the grey band; the largest gap is {nat(_largest(worst))} nat, at "
            f"{_named(steps, steps.index(worst))}."
        )
    first = beyond[0]
    name, mae = max(steps[first].maes.items(), key=lambda item: item[1])
    said = f"{name} is {nat(mae)} nat at {_named(steps, first)}"
    if first:
        before = steps[first - 1].maes.get(name)
        said += f", and was {nat(before)} at {_named(steps, first - 1)}: it broke in between"
    else:
        said += ", the first one: it was so from the start"
    after = len(steps) - first - 1
    again = [number for number in range(first + 1, len(steps)) if number not in beyond]
    if after and not again:
        return f"{said}. All later steps are beyond the accepted {tolerance:g} nat too."
    if again:
        return f"{said}. {_named(steps, again[0]).capitalize()} is within the accepted range again."
    return f"{said}."


def _named(steps: Sequence[StepReport], number: int) -> str:
    step = steps[number].step
    return "the records without a step" if step is None else f"step {step:,}"


def _table(steps: Sequence[StepReport], names: Sequence[str]) -> Table:
    sides = [s for s in ("rollout", "trainer") if any(s in step.weights for step in steps)]
    called = [s for s in ("rollout", "trainer") if any(s in step.versions for step in steps)]
    return Table(
        "Mean absolute gap by step, and the weights that scored",
        (
            "step",
            *(f"{name}, nat" for name in names),
            *(f"{side} weights' digest" for side in sides),
            *(f"{side}'s name for them" for side in called),
        ),
        tuple(
            (
                Cell("-" if step.step is None else f"{step.step:,}", number=True),
                *(Cell(exact(step.maes.get(name, math.nan)), number=True) for name in names),
                *(Cell(step.weights.get(side, "-")[:_DIGEST]) for side in sides),
                *(Cell(step.versions.get(side, "-")) for side in called),
            )
            for step in steps
        ),
    )
