import dataclasses
import math

import pytest

from layerbisect.bisect.verdict import LayerEvidence, OperatorError
from layerbisect.report.blocks import Table
from layerbisect.report.own_errors import MARKS, own_error_section
from tests.layerbisect.report.making import charts, culprit, verdict


def error(
    point: str, layer: int | None, side: str, size: float, convicted: bool = False
) -> OperatorError:
    kind = {"q": "rope", "embed": "embedding", "logits": "head"}[point.split(".")[-1]]
    return OperatorError(point, layer, kind, (kind,), side, 640, size, 1.1, convicted)


def table(errors: tuple[OperatorError, ...]) -> list[list[str]]:
    section = own_error_section(dataclasses.replace(verdict(), own_errors=errors))
    assert section is not None
    (found,) = (block for block in section.blocks if isinstance(block, Table))
    return [[cell.text for cell in row] for row in found.rows]


ERRORS = (
    error("embed", None, "rollout", 0.0),
    error("layers.0.attn.q", 0, "rollout", 1.0),
    error("layers.8.attn.q", 8, "rollout", 162.0, convicted=True),
    error("logits", None, "rollout", 1.2),
    error("layers.0.attn.q", 0, "trainer", 1.4),
    error("layers.8.attn.q", 8, "trainer", 1.1),
)


def test_convicted_operator_is_ringed_and_named_beside_the_largest_other() -> None:
    found = dataclasses.replace(verdict(), own_errors=ERRORS, status="divergent")
    chart = charts(own_error_section(found))["own-error"]
    assert "1 operator: the largest is layers.8.attn.q on the rollout side at 162x" in chart.reading
    assert "No other is above 1.4x (layers.0.attn.q, trainer)" in chart.reading
    ring = next(trace for trace in chart.figure.data if trace.name == "convicted")
    assert list(ring.y) == [162.0]


def test_a_verdict_that_accuses_nobody_convicts_no_operator() -> None:
    found = dataclasses.replace(verdict(), own_errors=ERRORS, status="inconclusive")
    section = own_error_section(found)
    names = [trace.name for trace in charts(section)["own-error"].figure.data]
    assert "beyond rounding" in names and "convicted" not in names
    assert section is not None
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    assert table.caption.startswith("What is beyond rounding, and the largest of each kind")
    assert {row[-1].text for row in table.rows} == {"beyond rounding", "rounding"}


def test_what_is_no_layers_stands_before_or_after_them() -> None:
    found = dataclasses.replace(verdict(), own_errors=ERRORS)
    axis = charts(own_error_section(found))["own-error"].figure.layout.xaxis
    assert (axis.ticktext[0], axis.tickvals[0]) == ("embed", -1)
    assert (axis.ticktext[-1], axis.tickvals[-1]) == ("head", 9)


def test_table_has_the_convicted_first_and_each_kind_on_both_sides() -> None:
    rows = [(row[0], row[2], row[3]) for row in table(ERRORS)]
    assert rows == [
        ("layers.8.attn.q", "rollout", "162x"),
        ("embed", "rollout", "0.0x"),
        ("layers.0.attn.q", "trainer", "1.4x"),
        ("logits", "rollout", "1.2x"),
    ]


def test_no_conviction_is_said_with_the_largest() -> None:
    sound = tuple(one for one in ERRORS if not one.convicted)
    found = dataclasses.replace(verdict(), own_errors=sound)
    reading = charts(own_error_section(found))["own-error"].reading
    assert reading.startswith("Rounding explains every operator here: none is above 1.4x")


def test_error_that_is_not_finite_is_counted_and_in_the_table() -> None:
    broken = error("layers.8.attn.q", 8, "trainer", math.nan, convicted=True)
    found = dataclasses.replace(verdict(), own_errors=(*ERRORS[:2], broken))
    reading = charts(own_error_section(found))["own-error"].reading
    assert "1 operator with an error that is not finite is not drawn" in reading
    assert table((*ERRORS[:2], broken))[0][0] == "layers.8.attn.q"


def test_of_many_the_convicted_and_the_largest_are_drawn() -> None:
    many = [error(f"layers.{n}.attn.q", n, "rollout", 1.0 + n / 1e4) for n in range(1500)]
    many.append(error("layers.0.attn.q", 0, "rollout", 0.5, convicted=True))
    found = dataclasses.replace(verdict(), own_errors=tuple(many))
    chart = charts(own_error_section(found))["own-error"]
    drawn = chart.figure.data[0].y
    assert len(drawn) == MARKS
    assert max(drawn) == pytest.approx(1.1499) and min(drawn) == 0.5
    assert "Of 1,501 operators the largest are drawn." in chart.reading


def test_earlier_verdict_shows_the_largest_of_each_layer() -> None:
    layer = LayerEvidence(8, None, None, {"rollout": 162.0}, {"rollout": "layers.8.attn.q"})
    found = dataclasses.replace(verdict(culprits=(culprit(8),)), layers=(layer,))
    reading = charts(own_error_section(found))["own-error"].reading
    assert "the largest is layers.8.attn.q on the rollout side at 162x" in reading


def test_verdict_without_own_errors_has_no_section() -> None:
    assert own_error_section(verdict()) is None
