"""The report's routing: what each chart shows and says, from verdicts with and without flips."""

import dataclasses

import pytest

from layerbisect.bisect.routing_report import (
    CAUSES,
    Cause,
    Explained,
    Flip,
    GapSplit,
    LayerRouting,
    RouteGap,
    Routing,
)
from layerbisect.bisect.verdict import Coverage, CoveredRows, Points, Verdict
from layerbisect.report.blocks import Chart, Facts, Section, Table
from layerbisect.report.routing import LOOKS, routing_section

GAPS = {
    "same": RouteGap(400, 0.0121),
    "context": RouteGap(0, None),
    "rerouted": RouteGap(38, 0.0912),
}
SPLIT = GapSplit(600, 0.02, 0.012, None, {"routes": 0.008, "rest": 0.012})


def explained(**counts: int) -> Explained:
    causes = {cause: counts.get(cause.replace(" ", "_"), 0) for cause in CAUSES}
    examples = tuple(
        Flip(17, 1312, (3,), (61,), (0.31, -0.3), cause) for cause, n in causes.items() if n
    )
    return Explained(
        causes, 0, {"a": 0, "b": 0}, 0, 0.0061, 0.0058, examples, {"a": ("layers.0.mlp.norm",)}
    )


def layer(number: int, told: Explained | None = None, **changes: object) -> LayerRouting:
    flips = sum(told.causes.values()) if told else 0
    one = LayerRouting(number, 640, flips, flips, 0.991, told, 0.0004, 0.02, 0.12, 0.0044, 0.06)
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


def section(*layers: LayerRouting, **changes: object) -> Section:
    routing = dataclasses.replace(Routing(layers, GAPS), **changes)  # type: ignore[arg-type]
    found = routing_section(verdict(routing))
    assert found is not None
    return found


def verdict(routing: Routing | None) -> Verdict:
    covered = Coverage(Points(1, ()), CoveredRows(1, 0))
    return Verdict("agree", None, (), (), None, covered, "", labels=("a <b>", "b"), routing=routing)


def charts(found: Section) -> dict[str, Chart]:
    return {block.id: block for block in found.blocks if isinstance(block, Chart)}


def text(found: Section) -> str:
    facts = [block for block in found.blocks if isinstance(block, Facts)]
    return "\n".join(f"{name}: {said}" for block in facts for name, said in block.rows)


def test_a_dense_model_has_no_routing() -> None:
    assert routing_section(verdict(None)) is None
    assert routing_section(verdict(Routing((), {}))) is None


def test_flips_are_stacked_by_cause_each_with_its_own_look() -> None:
    found = section(
        layer(0),
        layer(1, explained(near_tie=3, unexplained=2)),
        layer(2, explained(consequence=9)),
        layer(3, None, flips=1),
    )
    assert found.lead == (
        "0.6 % of routes differ, not all explained: 3 near ties, 9 consequences, 2 unexplained, "
        "1 not judged."
    )
    flips = charts(found)["routing-flips"]
    bars = {bar.name: list(bar.y) for bar in flips.figure.data}
    assert bars == {
        "near tie": [0, 3, 0, 0],
        "consequence": [0, 0, 9, 0],
        "unexplained": [0, 2, 0, 0],
        "not judged": [0, 0, 0, 1],
    }
    assert flips.figure.layout.barmode == "stack"
    looks = [(bar.marker.color, bar.marker.pattern.shape) for bar in flips.figure.data]
    assert len({colour for colour, _ in looks}) == len({shape for _, shape in looks}) == 4
    assert (
        "15 of 2,560 routes differ (0.6 %), the first in layer 1 and most in layer 2 (9 of 640"
        in (flips.reading)
    )
    assert "12 are explained, 2 are not, and of 1 it is not known; most of all 9 cons" in (
        flips.reading
    )
    assert flips.numbers is not None
    assert [cell.text for cell in flips.numbers.rows[1]] == ["1", "3", "0", "2", "0", "5"]
    said = text(found)
    assert "unexplained: a choice does not follow" in said and "inherited:" not in said
    assert "example: layer 1, position 17, token 1312: experts 3 against 61" in said


def test_every_cause_has_a_colour_and_a_pattern_of_its_own() -> None:
    assert set(LOOKS) == {*CAUSES, "not judged"}
    for part in zip(*LOOKS.values(), strict=True):
        assert len(set(part)) == len(LOOKS)


def test_where_all_routes_agree_there_are_weights_and_no_flips() -> None:
    found = section(layer(0), layer(1, weights_max=0.05))
    assert found.lead == "All 1,280 routes agree."
    assert list(charts(found)) == ["routing-weights"]
    assert "by 0.05 at most, in layer 1" in charts(found)["routing-weights"].reading


def test_what_was_not_captured_is_said_to_be_unknown() -> None:
    unknown = section(layer(0, explained(not_known=4)))
    assert "Why is not known" in charts(unknown)["routing-flips"].reading
    assert "to know more: not known is what came before the router: capture layers.0.mlp.norm" in (
        text(unknown)
    )
    bare = section(layer(0, weights_mean=None, weights_max=None, order=None, stream_same=None))
    (table,) = bare.blocks
    assert isinstance(table, Table)
    assert [cell.text for cell in table.rows[0][5:]] == ["-", "-", "-", "-", "0.06"]


@pytest.mark.parametrize(("overlap", "whole"), [(0.5, True), (0.997, False)])
def test_the_axis_shows_what_differs(overlap: float, whole: bool) -> None:
    chart = charts(section(layer(0, explained(inherited=4), overlap=overlap)))["routing-overlap"]
    assert (chart.figure.layout.yaxis.range == (0, 1.05)) is whole
    assert ("50 %" if whole else "99.70 %") in chart.reading


def test_the_gap_by_route_is_a_table_of_the_tokens_there_are() -> None:
    found = section(layer(0, explained(near_tie=1)))
    (table,) = (b for b in found.blocks if isinstance(b, Table) and "gap" in b.caption)
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["routed alike so far", "400", "0.0121"],
        ["re-routed", "38", "0.0912"],
    ]


def test_rows_whose_experts_are_not_of_their_logits_are_counted_by_side() -> None:
    told = dataclasses.replace(explained(unexplained=2), astray={"a <b>": 7, "b": 0})
    (table,) = (
        b for b in section(layer(0, told)).blocks if isinstance(b, Table) and len(b.rows[0]) > 5
    )
    assert table.columns[-2:] == ("not of its own logits, a <b>", "not of its own logits, b")
    assert [cell.text for cell in table.rows[0][-2:]] == ["7", "0"]


def test_the_split_is_bars_of_parts_that_add_up() -> None:
    split = charts(section(split=SPLIT))["routing-split"]
    assert [(bar.y[0], bar.x[0]) for bar in split.figure.data] == [
        ("routes", 0.008),
        ("rest", 0.012),
    ]
    assert split.reading == (
        "Of 0.0200 nat the largest part is rest (0.0120 nat). With own routes 0.0200 nat, a <b>'s "
        "routes forced 0.0120, over 600 tokens: routes 0.0080, rest 0.0120 nat."
    )
    assert "<b>" not in split.figure.to_json()


def test_many_layers_stay_few_marks() -> None:
    causes: tuple[Cause, ...] = CAUSES
    told = explained(**{cause.replace(" ", "_"): 3 for cause in causes})
    found = section(*(layer(number, told) for number in range(94)))
    for chart in charts(found).values():
        assert sum(len(trace.x) for trace in chart.figure.data) <= 600
