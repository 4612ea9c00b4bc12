"""The page's sections for A, B and C: they say what the scores say, and nothing else."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerbisect.bisect.scores.judge import judge
from layerbisect.bisect.scores.report import PairReport, PositionGap, StepReport
from layerbisect.bisect.token_report import EDGES, Distribution
from layerbisect.bisect.verdict import Gap, Verdict
from layerbisect.bisect.verdict_json import verdict_from_json
from layerbisect.report.blocks import Chart, Facts, Section, Table
from layerbisect.report.score_readings import position_reading
from layerbisect.report.score_spread import spread_reading
from layerbisect.report.scores import score_sections
from layerbisect.report.token_text import TokenText
from tests.bisect.scores.making import Change, Columns, run

pytest.importorskip("plotly")

Generator = np.random.Generator
TEXT = TokenText({n: f"<b>{n}\u202e" for n in range(400)}.get, added={}, byte_level=False)


def lowered(*columns: str, by: float = 0.1, start: int = 0, stop: int | None = None) -> Change:
    def change(scores: Columns, _: Generator) -> Columns:
        for column in columns:
            scores[column][start:stop] -= by
        return scores

    return change


def same(scores: Columns, _: Generator) -> Columns:
    return {column: scores["A"].copy() for column in scores}


def drifting(scores: Columns, _: Generator) -> Columns:
    scores["A"] -= 0.01 * np.arange(len(scores["A"]))
    return scores


def restless(scores: Columns, generator: Generator) -> Columns:
    scores["B1"] = scores["B0"] - np.abs(generator.normal(size=len(scores["B0"]))) * 0.05
    return scores


def without_trainer(seed: int) -> Verdict:
    return judge([run(seed).without("C0", "C1")])


VERDICTS: dict[str, Callable[[], Verdict]] = {
    "clean": lambda: judge([run(0)]),
    "A lower from position 1 on": lambda: judge([run(1, change=lowered("A", start=1))]),
    "C lower": lambda: judge([run(2, change=lowered("C0", "C1"))]),
    "first token": lambda: judge([run(3, change=lowered("A", by=3.0, stop=1))]),
    "drifting": lambda: judge([run(4, change=drifting)]),
    "equal": lambda: judge([run(5, change=same)]),
    "restless": lambda: judge([run(6, change=restless)]),
    "no trainer": lambda: without_trainer(7),
    "single tokens": lambda: judge([run(8, responses=64, tokens=1)]),
    "one token": lambda: judge([run(9, responses=1, tokens=1)]),
    "three steps": lambda: judge(
        [
            run(10, step=0, digests={"A": "a0", "B": "a0", "C": "c0"}),
            run(11, step=1, digests={"A": "a0", "B": "a0", "C": "c1"}, change=lowered("C0", "C1")),
            run(12, step=2, digests={"A": "a2", "B": "a2", "C": "c2"}),
        ]
    ),
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {name: make() for name, make in VERDICTS.items()}


def page(verdict: Verdict, text: TokenText | None = None) -> dict[str, Section]:
    return {section.id: section for section in score_sections(verdict, text)}


def charts(section: Section) -> dict[str, Chart]:
    return {block.id: block for block in section.blocks if isinstance(block, Chart)}


def table(section: Section, number: int = 0) -> Table:
    return [block for block in section.blocks if isinstance(block, Table)][number]


def cells(shown: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in shown.rows]


def reading(verdict: Verdict, id: str, section: str = "scores-gaps") -> str:
    return charts(page(verdict)[section])[id].reading


@pytest.mark.parametrize("name", VERDICTS)
def test_every_section_is_whole(verdicts: dict[str, Verdict], name: str) -> None:
    sections = score_sections(verdicts[name], TEXT)
    ids = [s.id for s in sections] + [i for s in sections for i in charts(s)]
    assert len({s.id for s in sections}) == len(sections) and ids
    for section in sections:
        assert section.lead.endswith(".")
        for block in section.blocks:
            if isinstance(block, Chart):
                assert block.reading.endswith(".")
                drawn = json.loads(block.figure.to_json())
                assert "NaN" not in block.figure.to_json()
                assert sum(len(trace.get("x", ())) for trace in drawn["data"]) <= 2000
                assert block.numbers is not None
            shown = block.numbers if isinstance(block, Chart) else block
            if isinstance(shown, Table):
                assert shown.rows and all(len(row) == len(shown.columns) for row in shown.rows)
            if isinstance(shown, Facts):
                assert shown.rows


@pytest.mark.parametrize("name", VERDICTS)
def test_what_was_read_back_from_json_shows_the_same(
    verdicts: dict[str, Verdict], name: str
) -> None:
    again = verdict_from_json(json.loads(json.dumps(verdicts[name].to_json())))
    said = [repr(score_sections(one, TEXT)) for one in (verdicts[name], again)]
    assert said[0] == said[1]


def test_a_clean_record_is_said_to_be_so(verdicts: dict[str, Verdict]) -> None:
    found = page(verdicts["clean"])
    assert list(found) == [
        "scores-gaps",
        "scores-spread",
        "scores-worst",
        "scores-shapes",
        "scores-repeats",
        "scores-effect",
    ]
    assert "accepted" in reading(verdicts["clean"], "scores-position")
    assert "apart" not in reading(verdicts["clean"], "scores-position")
    assert "both signs nearly cancel" in reading(verdicts["clean"], "scores-position-signed")
    assert found["scores-repeats"].lead == (
        "The rollout engine's replay (B), one worker, repeats itself exactly. The trainer (C) "
        "repeats itself exactly."
    )


def test_case_1_a_is_lower_from_position_1_on(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["A lower from position 1 on"]
    said = reading(verdict, "scores-position")
    assert said.startswith("A differs from both others from position 1 on, by 0.")
    assert "B0-C0 stays small, 0.00" in said
    signed = reading(verdict, "scores-position-signed")
    assert "A-B0: -0.0" in signed and "nearly all one way, A is the lower one" in signed
    assert "it lies to one side" in reading(verdict, "scores-spread", "scores-spread")
    shapes = page(verdict)["scores-shapes"]
    assert "The first: A is lower than B0 by 0.100 nat from response position 1 on." in shapes.lead
    first = dict(zip(table(shapes).columns, cells(table(shapes))[0], strict=True))
    assert (first["shape"], first["role"], first["whose"]) == (
        "constant offset",
        "convicts",
        "A or B",
    )


def test_case_2_c_differs_everywhere(verdicts: dict[str, Verdict]) -> None:
    said = reading(verdicts["C lower"], "scores-position")
    assert said.startswith("C differs from both others at every position, by ")
    assert "C0 is the lower one" in reading(verdicts["C lower"], "scores-position-signed")


def test_case_3_the_step_that_broke_is_named(verdicts: dict[str, Verdict]) -> None:
    found = page(verdicts["three steps"])
    assert "1,024 tokens of 8 responses of step 1, " in found["scores-gaps"].lead
    (chart,) = charts(found["scores-steps"]).values()
    assert re.fullmatch(
        r"\w+-C0 is 0\.\d+ nat at step 1, and was 0\.\d+ at step 0: it broke in between\. "
        r"Step 2 is within the accepted range again\.",
        chart.reading,
    )
    assert chart.numbers is not None
    assert [row[0] for row in cells(chart.numbers)] == ["0", "1", "2"]
    assert cells(chart.numbers)[1][-2:] == ["a0", "c1"]


def test_a_gap_of_the_first_token_alone_is_said_to_be_so(verdicts: dict[str, Verdict]) -> None:
    said = reading(verdicts["first token"], "scores-position")
    assert said.startswith("A differs from both others at the first token alone, by ")


def test_a_gap_that_grows_is_said_to_grow(verdicts: dict[str, Verdict]) -> None:
    said = reading(verdicts["drifting"], "scores-position")
    assert said.startswith("A differs from both others, more and more: 0.0")
    assert "at positions 64-127" in said


def test_the_first_token_stands_apart_in_the_chart(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["clean"]
    assert verdict.scores is not None
    pair = verdict.scores.pairs[0]
    chart = charts(page(verdict)["scores-gaps"])["scores-position"]
    (line,) = [one for one in chart.figure.data if one.name == pair.name]
    assert line.y[1] is None and line.x[2] - line.x[0] > 1
    assert [y for y in line.y if y is not None] == [gap.mae for gap in pair.by_position]
    assert chart.figure.layout.xaxis.ticktext[0] == "first token"


def test_equal_scores_are_said_to_be_equal(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["equal"]
    assert reading(verdict, "scores-position") == (
        "A-B0, B0-C0, A-C0: 0 at every position, the scores are equal."
    )
    assert "scores-worst" not in page(verdict)
    assert "all 1,024 tokens within 0.00001 nat of 0" in reading(
        verdict, "scores-spread", "scores-spread"
    )


def test_repeats_that_hide_a_gap_are_named(verdicts: dict[str, Verdict]) -> None:
    verdict = judge([run(6, change=restless)], tolerance=0.001)
    said = reading(verdict, "scores-position")
    assert re.search(r"Repeats of one side differ by 0\.\d+ nat: they alone may make A-B0", said)
    repeats = page(verdicts["restless"])["scores-repeats"]
    assert "replay (B), one worker, does not repeat itself: " in repeats.lead
    assert len(cells(table(repeats, 1))) == 20


def test_without_c_there_is_one_pair(verdicts: dict[str, Verdict]) -> None:
    found = page(verdicts["no trainer"])
    assert "scores-effect" not in found
    assert [row[0] for row in cells(table(found["scores-gaps"]))] == ["A-B0"]


def test_responses_of_one_token_have_no_later_ones(verdicts: dict[str, Verdict]) -> None:
    gaps = page(verdicts["single tokens"])["scores-gaps"]
    later = table(gaps).columns.index("later tokens")
    assert {row[later] for row in cells(table(gaps))} == {"-"}
    chart = charts(gaps)["scores-position"]
    assert list(chart.figure.layout.xaxis.ticktext) == ["first token"]


def test_a_single_token_shows_no_side_and_no_shape(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["one token"]
    assert "1 token cannot tell" in reading(verdict, "scores-position-signed")
    assert "too short to show a shape" in page(verdict)["scores-shapes"].lead


def test_nothing_compared_shows_nothing(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["clean"]
    assert verdict.scores is not None
    assert score_sections(replace(verdict, scores=None), None) == ()
    nothing = replace(
        verdict.scores, pairs=(), repeats=(), effect=None, silent=(), findings=(), tokens=0
    )
    assert score_sections(replace(verdict, scores=nothing), None) == ()


def test_worst_tokens_have_their_text_where_there_is_a_tokenizer(
    verdicts: dict[str, Verdict],
) -> None:
    verdict = verdicts["A lower from position 1 on"]
    plain, told = (table(page(verdict, t)["scores-worst"]) for t in (None, TEXT))
    assert "text" not in plain.columns
    place = told.columns.index("text")
    assert len(told.rows) == 10
    for row in told.rows:
        number = int(row[place - 1].text)
        assert row[place].text == (f"<b>{number}\\u202e" if number < 400 else "no such token")
        assert row[place].token == (number < 400)


def test_names_from_a_file_are_no_markup_in_charts(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["clean"]
    assert verdict.scores is not None
    pairs = tuple(replace(pair, name="<a href='x'>&") for pair in verdict.scores.pairs)
    steps = tuple(StepReport(n, {"<b>": 0.1}, {}, {}) for n in range(2))
    hostile = replace(verdict, scores=replace(verdict.scores, pairs=pairs, steps=steps))
    for section in score_sections(hostile, None):
        for chart in charts(section).values():
            assert "<a" not in chart.figure.to_json() and "<b>" not in chart.figure.to_json()


def test_of_many_steps_the_worst_are_kept(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["clean"]
    assert verdict.scores is not None
    steps = [StepReport(n, {"A-C0": 0.004}, {}, {}) for n in range(5000)]
    steps[3333] = StepReport(3333, {"A-C0": 0.7}, {}, {})
    many = replace(verdict, scores=replace(verdict.scores, steps=tuple(steps)))
    section = page(many)["scores-steps"]
    (chart,) = charts(section).values()
    assert "are left out" in section.lead and "5,000 steps" in section.lead
    assert "A-C0 is 0.7000 nat at step 3,333" in chart.reading
    assert max(len(trace.x) for trace in chart.figure.data) <= 400


SIZES = st.sampled_from([0.0, 0.0005, 0.004, 0.011, 0.019, 0.05, 0.4, 3.0])
NUMBER = r"\d+(?:\.\d+)?(?:e-\d+)?"


def pair_of(first: str, second: str, sizes: list[float]) -> PairReport:
    spans = [(1 << bits >> 1, 1 << bits) for bits in range(len(sizes))]
    gaps = tuple(
        PositionGap(start, stop, 8 * (stop - start), size, -size)
        for (start, stop), size in zip(spans, sizes, strict=True)
    )
    rows = sum(gap.tokens for gap in gaps)
    mae = sum(gap.mae * gap.tokens for gap in gaps) / rows
    gap = Gap(mae, -mae, max(sizes), max(sizes), max(sizes), rows)
    return PairReport(f"{first}-{second}", first, second, gap, None, None, gaps, ())


def approximately(text: str, value: float) -> bool:
    return abs(float(text) - value) <= max(5.1e-5, 0.006 * value if value >= 10 else 0)


@settings(max_examples=300)
@given(st.lists(st.lists(SIZES, min_size=6, max_size=6), min_size=3, max_size=3))
def test_what_is_said_of_positions_is_true(sizes: list[list[float]]) -> None:
    columns = (("A", "B0"), ("B0", "C0"), ("A", "C0"))
    pairs = [pair_of(*names, one) for names, one in zip(columns, sizes, strict=True)]
    said = position_reading(pairs, 0.01, {})
    every = [gap.mae for pair in pairs for gap in pair.by_position]
    assert ("every point lies in the grey" in said.lower()) == (0 < max(every) <= 0.01)
    assert ("the scores are equal" in said) == (max(every) == 0)
    assert said.startswith("Over all tokens every gap is within") <= (
        max(pair.gap.mae for pair in pairs) <= 0.01 < max(every)
    )
    for pair in pairs:
        mine = [gap.mae for gap in pair.by_position]
        if f"{pair.name} stays small" in said:
            assert pair.gap.mae <= 0.01 and max(mine) <= 0.02
        found = re.search(
            rf"{pair.name} is apart (.*?), by ([^;]*?) nat(?:, elsewhere[^;]*)?", said
        )
        letter = re.match("([ABC]) differs from both others (.*?), by (.*?) nat", said)
        if letter and letter[1] in (pair.first[0], pair.second[0]):
            found = letter
            where, by = letter[2], letter[3]
        elif found:
            where, by = found[1], found[2]
        else:
            continue
        low, high = re.findall(NUMBER, by)[0], re.findall(NUMBER, by)[-1]
        inside = [size for size in mine if float(low) - 1e-4 <= size <= float(high) + 1e-4]
        assert inside
        start = re.fullmatch(r"from position (\d+) on", where)
        if where == "at every position":
            assert inside == mine
        elif where == "at the first token alone":
            assert mine[0] > 4 * max(mine[1:]) or max(mine[1:]) <= 0.01 < mine[0]
        elif start:
            late = [gap.mae for gap in pair.by_position if gap.start >= int(start[1])]
            assert all(size in inside for size in late)
            assert min(late) > max(mine[: len(mine) - len(late)])


@given(st.lists(st.integers(0, 1000), min_size=len(EDGES) - 1, max_size=len(EDGES) - 1))
def test_what_is_said_of_the_spread_adds_up(counts: list[int]) -> None:
    total = sum(counts)
    if not total:
        return
    pair = replace(pair_of("A", "B0", [0.4] * 3), distribution=Distribution(EDGES, tuple(counts)))
    said = spread_reading([pair]).replace(",", "")
    middle = len(counts) // 2
    below, about, above = sum(counts[:middle]), counts[middle], sum(counts[middle + 1 :])
    if about == total:
        assert f"all {total} token" in said
        return
    assert f"{below} of {total} token" in said and f"below 0 {above} above" in said
    assert (f" {about} within" in said) == (about > 0)
    assert ("one side" in said) == (max(below, above) >= 0.95 * total and total >= 32)
