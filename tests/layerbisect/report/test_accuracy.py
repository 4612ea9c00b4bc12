"""The report's accuracy: groups with their intervals, every miss, and how they are counted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from layerbisect.accuracy_summary import AccuracySummary, Miss, group
from layerbisect.report.accuracy import accuracy_section
from layerbisect.report.blocks import Chart, Table
from layerbisect.report.results import AccuracyResult, read_result
from scripts.accuracy import main
from scripts.planted.summary import summarize
from tests.scripts.planted.test_figures import answer, culprit, result

SUMMARY = AccuracySummary(
    "20 cases were judged",
    (
        group("tuned on", 19, 20, "kind"),
        group("kept <i>aside</i>", 3, 4, "kind"),
        group("float32", 4, 4, "dtype"),
    ),
    (Miss("one case", "norm of layer 3 (rollout)", "agree"),),
)


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(19, 20, 0.7639, 0.9911), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (1, 1, 0.2065, 1.0)],
)
def test_the_interval_is_wilson_s(right: int, total: int, low: float, high: float) -> None:
    found = group("x", right, total)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("right", "total"), [(0, 0), (2, 1), (-1, 3)])
def test_a_group_that_cannot_be_is_refused(right: int, total: int) -> None:
    with pytest.raises(ValueError, match="a group needs cases"):
        group("x", right, total)


def test_each_division_is_a_chart_with_its_intervals() -> None:
    section = accuracy_section(SUMMARY)
    assert section.lead.startswith("20 cases were judged. Lines are 95 % intervals")
    first, second, misses = section.blocks
    assert isinstance(first, Chart) and isinstance(second, Chart) and isinstance(misses, Table)
    (bar,) = first.figure.data
    assert list(bar.x) == [95.0, 75.0]
    assert [x - down for x, down in zip(bar.x, bar.error_x.arrayminus, strict=True)] == (
        pytest.approx([76.39, 30.06], abs=0.01)
    )
    assert "<i>" not in first.figure.to_json()
    assert first.reading == ("The least is “kept <i>aside</i>”, 75.0 % (3 of 4; 30.1 % to 95.4 %).")
    assert second.reading == (
        "All are right in the group; the fewest cases are of “float32”, 4, which leaves it at "
        "51.0 % or more."
    )
    assert [cell.text for cell in misses.rows[0]] == [
        "one case",
        "norm of layer 3 (rollout)",
        "agree",
    ]
    assert first.numbers is not None
    assert [cell.text for cell in first.numbers.rows[0]] == [
        "tuned on", "19", "20", "95.0 %", "76.4 % to 99.1 %",
    ]  # fmt: skip


def test_nearly_all_is_not_called_all() -> None:
    section = accuracy_section(AccuracySummary("many", (group("x", 9999, 10000, "y"),), ()))
    (chart,) = section.blocks
    assert isinstance(chart, Chart) and "99.9 % (9,999 of 10,000" in chart.reading


def case(**row: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"model": "tiny", "dtype": "float32", "held_out": False}
    return result(**(base | row)).row


def judged() -> list[dict[str, Any]]:
    clean = {"kind": "control", "truths": [], "effect": 0.0}
    return [
        case(),
        case(found=False, id="missed"),
        case(held_out=True, dtype="bfloat16"),
        case(effect=0.5, output=0.5, found=False, id="nobody could see it"),
        case(found=False, **clean),
        case(answer=answer(culprit(0, "norm", "trainer")), id="accused", **clean),
    ]


def test_results_are_counted_by_kind_and_place_and_operator() -> None:
    summary = summarize(judged())
    counts = {(one.of, one.name): (one.right, one.total) for one in summary.groups}
    assert counts == {
        ("kind of case", "one fault, tuned on"): (1, 2),
        ("kind of case", "one fault, kept aside"): (1, 1),
        ("kind of case", "controls with nothing wrong"): (1, 2),
        ("model and dtype, one fault", "tiny, bfloat16"): (1, 1),
        ("model and dtype, one fault", "tiny, float32"): (1, 2),
        ("model and dtype, controls", "tiny, float32"): (1, 2),
        ("operator that was planted, one fault", "attention"): (2, 3),
    }
    assert [(one.case, one.planted, one.named) for one in summary.misses] == [
        ("missed", "attention of layer 3 (rollout)", "agree"),
        ("accused", "nothing", "norm 0 trainer"),
    ]
    assert "of 3 single faults" in summary.measured and "of 2 clean controls 1" in summary.measured


def test_what_the_script_prints_is_a_result(tmp_path: Path) -> None:
    runner = CliRunner()
    empty = runner.invoke(main, ["summary", "--work", str(tmp_path)])
    assert empty.exit_code == 1 and "holds no results" in empty.output
    lines = "".join(json.dumps(row) + "\n" for row in judged())
    (tmp_path / "results.jsonl").write_text(lines)
    done = runner.invoke(main, ["summary", "--work", str(tmp_path)])
    assert done.exit_code == 0, done.output
    target = tmp_path / "accuracy.json"
    target.write_text(done.stdout)
    read = read_result(target)
    assert isinstance(read, AccuracyResult)
    assert asdict(read.summary) == asdict(summarize(judged()))
