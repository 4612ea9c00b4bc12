"""What gap rounding alone makes, by kind of operator, beside the gap that was measured."""

from __future__ import annotations

import math

from layerbisect.bisect.budget import GAP_FACTOR
from layerbisect.bisect.verdict import RoundingBudget, Verdict
from layerbisect.report.blocks import Cell, Chart, Section, Table
from layerbisect.report.palette import AMBER, GREEN, GREY, ORANGE, figure, label
from layerbisect.report.sides import side_colour
from layerbisect.terminal.verdict import costliest_words
from layerbisect.wording import count, nat, percent, times


def budget_section(verdict: Verdict) -> Section | None:
    """The rounding budget, and which operator to raise to float32."""
    budget = verdict.rounding_budget
    if budget is None:
        return None
    lead = (
        "The reference runs with one kind of operator rounded at a time: what each moves the "
        f"log-probs from full precision, over {count(budget.rows, 'token')}. It is what gap is "
        "normal for this model in this dtype."
    )
    blocks = (_gap_chart(verdict, budget), _kinds_chart(budget))
    return Section("budget", "What rounding alone explains", lead, blocks)


def _gap_chart(verdict: Verdict, budget: RoundingBudget) -> Chart:
    bars = [("rounding predicts between the sides", budget.predicted_gap, GREEN)]
    gap = verdict.gap
    if gap is not None:
        bars.append(("measured between the sides", gap.mae, AMBER))
    bars += [
        (f"{side} from full precision", distance, side_colour(verdict.labels, side))
        for side, distance in budget.distances.items()
    ]
    bars.append(("the whole model rounded, from full precision", budget.whole, GREY))
    reading = f"Rounding alone predicts {nat(budget.predicted_gap)} nat between the two sides"
    if gap is None:
        reading += "; no gap was measured."
    elif budget.predicted_gap <= 0:
        reading += f"; measured is {nat(gap.mae)} nat."
    else:
        ratio = gap.mae / budget.predicted_gap
        reading += f"; measured is {nat(gap.mae)} nat, {times(ratio)} that"
        if verdict.status == "agree":
            reading += ", and within what rounding explains."
        elif verdict.culprits and ratio <= GAP_FACTOR:
            reading += ". Its size alone would pass as rounding: an operator's own error convicts."
        else:
            reading += "."
    if budget.whole > 0:
        far = max(
            ((d, side) for side, d in budget.distances.items() if math.isfinite(d)), default=None
        )
        if far is not None:
            distance = times(far[0] / budget.whole)
            reading += (
                f" The side farther from full precision is {far[1]}, at {distance} the distance of "
                "the whole model rounded."
            )
    return _bars("budget-gap", "Predicted and measured", reading, "mean absolute, nat", bars)


def _kinds_chart(budget: RoundingBudget) -> Chart:
    shares = sorted(budget.shares.items(), key=lambda item: -item[1])
    bars = [(kind, share, ORANGE if share == shares[0][1] else GREY) for kind, share in shares]
    costliest = costliest_words(budget)
    reading = f"Costliest is {costliest}." if costliest else "No kind of operator rounds."
    if budget.whole > 0:
        apart = percent(abs(budget.quadrature / budget.whole - 1))
        reading += (
            f" Added in squares the kinds come to {nat(budget.quadrature)} nat, the whole model "
            f"rounded to {nat(budget.whole)} ({apart} apart)."
        )
    title = "What each kind of operator costs"
    return _bars("budget-kinds", title, reading, "distance from full precision, nat", bars)


def _bars(
    id: str, title: str, reading: str, axis: str, bars: list[tuple[str, float, str]]
) -> Chart:
    made = figure(axis, "")
    # the first on top
    shown = [(name, value, colour) for name, value, colour in reversed(bars) if value >= 0]
    made.add_bar(
        orientation="h",
        x=[value for _, value, _ in shown],
        y=[label(name) for name, *_ in shown],
        text=[nat(value) for _, value, _ in shown],
        textposition="outside",
        cliponaxis=False,
        marker_color=[colour for *_, colour in shown],
        hovertemplate="%{y}: %{x:.4g} nat<extra></extra>",
    )
    made.update_xaxes(rangemode="tozero")
    made.update_yaxes(automargin=True, title=None)
    rows = tuple((Cell(name), Cell(nat(value), number=True)) for name, value, _ in bars)
    return Chart(id, title, reading, made, Table(title, ("what", "nat"), rows), 90 + 32 * len(bars))
