import dataclasses

from layerbisect.bisect.verdict import Probe
from layerbisect.report.blocks import Facts
from layerbisect.report.layers import carried_section
from tests.layerbisect.report.making import GAP, charts, culprit, verdict

STEP = (0.0, 0.01, 0.02, 0.09, 0.095)


def test_names_the_largest_step_and_that_it_is_convicted() -> None:
    chart = charts(carried_section(verdict(STEP, culprits=(culprit(2),))))["carried-gap"]
    assert "over layer 2, from 0.0200 to 0.0900 nat: 77 % of the squared gap" in chart.reading
    assert "It is convicted." in chart.reading
    marked = [shape for shape in chart.figure.layout.shapes if shape.yref == "paper"]
    assert [(shape.x0, shape.x1, shape.name) for shape in marked] == [
        (2, 3, "convicted, on the rollout side")
    ]


def test_convicted_step_that_is_not_the_largest_is_said_beside_it() -> None:
    found = verdict(STEP, culprits=(culprit(0),))
    reading = charts(carried_section(found))["carried-gap"].reading
    assert "over layer 2, from" in reading
    assert "The step over layer 0, convicted, is 1 %." in reading


def test_search_shows_only_what_was_probed_and_says_so() -> None:
    probed = (0.0, None, None, None, 0.02, 0.09, None, None, 0.095)
    chart = charts(carried_section(verdict(probed, probe=Probe("search", 8))))["carried-gap"]
    assert tuple(chart.figure.data[0].x) == (0, 4, 5, 8)
    assert "Only 4 boundaries were probed" in chart.reading
    assert "over layer 4, from 0.0200 to 0.0900" in chart.reading


def test_shares_are_of_the_squared_gap_and_the_rest_is_the_heads() -> None:
    chart = charts(carried_section(verdict(STEP, culprits=(culprit(2),))))["layer-shares"]
    shares = {name.text: share.text for name, share in chart.numbers.rows}  # type: ignore[union-attr]
    assert shares == {
        "layer 0": "1 %",
        "layer 1": "3 %",
        "layer 2": "77 %",
        "layer 3": "9 %",
        "after the last probed boundary": "10 %",
    }


def test_rounding_of_the_tail_is_a_band_and_no_share() -> None:
    found = verdict((0.0, 0.02, 0.02, 0.09, 0.09), probe=Probe("search", 8, "trainer", floor=0.02))
    both = charts(carried_section(found))
    assert "Up to 0.0200 nat, the grey band" in both["carried-gap"].reading
    shares = [share.text for _, share in both["layer-shares"].numbers.rows]  # type: ignore[union-attr]
    assert shares[0] == "0 %"


def test_whole_gap_far_above_what_the_layers_carry_does_not_flatten_the_line() -> None:
    far = dataclasses.replace(GAP, mae=5.0)
    chart = charts(carried_section(verdict(STEP, gap=far, budget=None)))["carried-gap"]
    assert chart.figure.layout.shapes == ()
    assert (
        "The last boundary carries 0.0950 of 5.0000 nat; what follows it adds 100 %"
        in chart.reading
    )


def test_nothing_probed_is_said() -> None:
    section = carried_section(verdict((None, None, None)))
    assert section is not None
    (facts,) = section.blocks
    assert isinstance(facts, Facts)
    assert "No layer boundary was probed" in facts.rows[0][1]


def test_equal_sides_have_no_step() -> None:
    found = verdict((0.0, 0.0, 0.0), gap=dataclasses.replace(GAP, mae=0.0))
    both = charts(carried_section(found))
    assert both["carried-gap"].reading.startswith("The carried gap does not grow")
    assert set(both) == {"carried-gap"}


def test_verdict_of_scores_has_no_layers() -> None:
    assert carried_section(verdict()) is None
