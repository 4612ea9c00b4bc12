import dataclasses

import numpy as np

from layerbisect.bisect.scores.report import PositionGap, TokenGap
from layerbisect.bisect.token_report import (
    Column,
    DistributionMeasure,
    Heatmap,
    TokenReport,
)
from layerbisect.bisect.verdict import Verdict
from layerbisect.report.blocks import Cell, Table
from layerbisect.report.budget import budget_section
from layerbisect.report.gap import gap_section
from layerbisect.report.token_text import TokenText
from tests.layerbisect.report.making import GAP, charts, culprit, verdict

TEXT = TokenText(lambda token: None, added={7: "<b>\u202e"}, byte_level=False)


def report(heatmaps: tuple[Heatmap, ...] = ()) -> TokenReport:
    measure = DistributionMeasure()
    measure.add(np.array([0.02, -0.02, -0.3, -0.5]))
    return TokenReport(
        distribution=measure.report(),
        by_position=(PositionGap(1, 2, 4, 0.05, 0.01), PositionGap(2, 4, 8, 0.2, -0.1)),
        worst=(TokenGap("s1", 3, 7, -9.5, -9.0, -0.5),),
        sequences=(),
        heatmaps=heatmaps,
    )


def shown(heatmaps: tuple[Heatmap, ...] = ()) -> Verdict:
    return dataclasses.replace(verdict(), tokens=report(heatmaps))


def worst(found: Verdict, text: TokenText | None = None) -> tuple[Cell, ...]:
    section = gap_section(found, text)
    assert section is not None
    table = section.blocks[-1]
    assert isinstance(table, Table)
    return table.rows[0]


def test_positions_beyond_what_rounding_predicts_are_counted() -> None:
    chart = charts(gap_section(shown()))["gap-position"]
    assert "largest at positions 2 to 3: 0.2000 nat over 8 tokens" in chart.reading
    assert "Rounding predicts up to 0.0600 nat, the grey band; 1 of 2 bins is beyond." in (
        chart.reading
    )
    assert [shape.y1 for shape in chart.figure.layout.shapes] == [0.06]


def test_distribution_says_how_many_lie_on_either_side() -> None:
    chart = charts(gap_section(shown()))["gap-spread"]
    assert chart.reading.startswith("25 % of 4 tokens lie above 0 and 75 % below")
    assert sum(number for number in chart.figure.data[0].y if number) == 4


def test_distribution_has_as_many_bars_to_the_left_of_zero_as_differences_below_it() -> None:
    bars = charts(gap_section(shown()))["gap-spread"].figure.data[0]
    below = [number for x, number in zip(bars.x, bars.y, strict=True) if x < 0 and number]
    assert below == [1, 1, 1]


def test_worst_token_opens_the_row_that_predicted_it_where_there_is_a_heatmap() -> None:
    assert [cell.opens for cell in worst(shown())] == [""] * 6
    heatmap = Heatmap("stream", "relative", (0, 1), (Column("s1", 0, 9),), ((0.0,), (1.0,)))
    assert [cell.opens for cell in worst(shown((heatmap,)))][1] == "s1:2"


def test_text_of_a_token_is_inert_and_marked_as_such() -> None:
    cell = worst(shown(), TEXT)[3]
    assert cell == Cell("<b>\\u202e", token=True)


def test_gap_without_tokens_has_its_figures() -> None:
    section = gap_section(verdict())
    assert section is not None
    (table,) = section.blocks
    assert isinstance(table, Table)
    assert [cell.text for cell in table.rows[0]] == [
        "636", "0.1000", "-0.0100", "0.3000", "0.4000", "0.5000",
    ]  # fmt: skip


def test_no_gap_no_section() -> None:
    assert gap_section(verdict(gap=None)) is None


def test_budget_says_what_to_raise_and_what_that_brings() -> None:
    both = charts(budget_section(verdict()))
    assert "measured is 0.1000 nat, 1.7x that, and within what rounding explains." in (
        both["budget-gap"].reading
    )
    assert both["budget-kinds"].reading.startswith(
        "Costliest is residual; with it in float32 on both sides the predicted gap falls from "
        "0.0600 to about 0.0332."
    )


def test_budget_never_says_of_a_fault_that_rounding_explains_it() -> None:
    convicted = charts(budget_section(verdict(culprits=(culprit(8),))))["budget-gap"].reading
    assert "1.7x that. The side" in convicted
    small = dataclasses.replace(GAP, mae=0.05)
    both = charts(budget_section(verdict(culprits=(culprit(8),), gap=small)))
    assert (
        "0.8x that. Its size alone would pass as rounding: an operator's own error convicts."
        in (both["budget-gap"].reading)
    )


def test_verdict_without_a_budget_has_no_section() -> None:
    assert budget_section(verdict(budget=None)) is None
