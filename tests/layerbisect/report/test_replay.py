"""The report's replays: the engine first, every implementation, and what could not be run."""

import dataclasses

from layerbisect.kernels.replay.deterministic import deterministic_table
from layerbisect.kernels.replay.report import Replay
from layerbisect.report.blocks import Chart, Facts, Section, Table
from layerbisect.report.replay import replay_section
from tests.layerbisect.test_cli_replay import GUILTY, errors, ran, replay_of


def section(*replays: Replay, **options: object) -> Section:
    found = replay_section(replays, options.pop("left_out", {}), **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def table(found: Section, start: str) -> Table:
    (one,) = (b for b in found.blocks if isinstance(b, Table) and b.caption.startswith(start))
    return one


def texts(one: Table) -> list[dict[str, str]]:
    return [dict(zip(one.columns, (cell.text for cell in row), strict=True)) for row in one.rows]


def test_the_engine_is_the_first_and_marked() -> None:
    found = section(replay_of())
    assert found.lead.startswith("1 of 1 stretch errs beyond rounding: layers.9.attn.context.")
    one = table(found, "layers.9.attn.context")
    first, fast, *_ = rows = texts(one)
    assert (first["implementation"], first["state"]) == ("rollout (the engine)", "beyond rounding")
    assert all(cell.strong for cell in (one.rows[0][0], one.rows[0][3]))
    assert (first["error p50"], first["error p95"], first["worst row"]) == ("171x", "209x", "1.3x")
    assert (first["rows that change in a repeat"], first["time"]) == ("-", "-")
    assert fast["in another batch"] == "35 %" and fast["setting"] == "triton, fast"
    assert fast["same bits as the engine"] == "99 %"
    assert (fast["right bits"], fast["farthest"]) == ("74 %", "<=1 ulp")
    assert [row["state"] for row in rows] == [
        "beyond rounding", "ran", "ran", "garbage", "beyond rounding",
    ]  # fmt: skip
    # nothing attends in chunks here
    assert "in chunks" not in one.columns


def test_the_chart_shows_the_median_the_95th_percentile_and_the_worst_row() -> None:
    found = section(replay_of())
    (chart,) = (b for b in found.blocks if isinstance(b, Chart))
    assert chart.title == "layers.9.attn.context (attention)"
    assert chart.reading == (
        "Convicted: rollout errs beyond rounding, 209x at p95. At p95, 3 implementations lie at "
        "1.1x to 209x. A row beyond 4x (dashed) is in excess of rounding."
    )
    dots = {trace.name: trace for trace in chart.figure.data if trace.name}
    within = dots["95th percentile of rows, within rounding"]
    beyond = dots["95th percentile, beyond rounding"]
    assert list(within.y) == ["triton-fast", "triton-deterministic"]
    assert list(beyond.y) == ["rollout (the engine)", "wrong"]
    assert within.marker.symbol != beyond.marker.symbol
    assert chart.figure.layout.yaxis.categoryarray[0] == "rollout (the engine)"
    assert chart.figure.layout.xaxis.ticktext[:2] == ("1x", "4x")


def test_what_did_not_run_is_named_once_with_its_reason() -> None:
    found = section(replay_of(), replay_of("layers.9.mid"), left_out={"layers.9.mlp.out": "no"})
    rows = texts(table(found, "What did not run"))
    assert rows[0] == {
        "implementation": "dead", "state": "crashed", "why": "its process was killed",
    }  # fmt: skip
    assert rows[1]["implementation"] == "aiter, te"
    facts = [row for b in found.blocks if isinstance(b, Facts) for row in b.rows]
    assert ("layers.9.mlp.out", "no") in facts
    assert ("convicted", "a bug in its attention, not rounding") in facts
    assert ("wrong", "rope by the low-precision reference") in facts
    assert "2 of 2 stretches err beyond rounding" in found.lead


def test_without_figures_there_is_a_conclusion_and_no_chart() -> None:
    unknown = replay_of(
        engine=None, results=(), status="inconclusive", conclusion="3 rows are too few to judge"
    )
    found = section(unknown)
    assert not [b for b in found.blocks if isinstance(b, Chart | Table)]
    assert isinstance(found.blocks[0], Facts)
    assert found.blocks[0].rows == (("inconclusive", "3 rows are too few to judge"),)
    assert found.lead.startswith("0 of 1 stretch errs beyond rounding; 1 could not be judged.")
    nothing = section(left_out={"layers.0.mid": "it was not captured"})
    assert nothing.lead == "Nothing could be replayed."
    assert replay_section((), {}) is None


def test_figures_that_are_not_finite_are_not_drawn_and_not_hidden() -> None:
    nan = dataclasses.replace(GUILTY, ratio=float("nan"), median=float("nan"), nonfinite=7)
    found = section(replay_of(engine=nan, results=(ran("torch"),)))
    (chart,) = (b for b in found.blocks if isinstance(b, Chart))
    assert all("rollout (the engine)" not in trace.y for trace in chart.figure.data)
    assert "7 rows not finite" in chart.reading
    assert texts(table(found, "layers.9"))[0]["error p95"] == "-"
    exact = errors(ratio=0.0, median=0.0, worst=())
    chart.figure.to_json()
    (chart,) = (
        b for b in section(replay_of(engine=exact, results=())).blocks if isinstance(b, Chart)
    )
    assert all(x > 0 for trace in chart.figure.data for x in trace.x)


def test_names_of_implementations_are_inert_in_the_chart() -> None:
    found = section(replay_of(results=(ran("<a href='x'>y</a>"),)))
    (chart,) = (b for b in found.blocks if isinstance(b, Chart))
    assert "<a" not in "".join(str(y) for trace in chart.figure.data for y in trace.y)


def test_the_deterministic_pairs_have_both_settings_in_a_cell() -> None:
    replays = (replay_of(),)
    (row,) = texts(table(section(*replays, pairs=deterministic_table(replays)), "What a det"))
    assert row["off, on"] == "triton-fast, triton-deterministic"
    assert row["in another batch"] == "35 % / same" and row["error p95"] == "1.1x / 1.1x"
    none = section(*replays, pairs=())
    assert any(isinstance(b, Facts) and "has such a switch" in b.rows[0][1] for b in none.blocks)
