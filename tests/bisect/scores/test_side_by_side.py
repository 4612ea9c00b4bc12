"""Two runs side by side: back within the control's range, or not."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from layerbisect.bisect.scores.side_by_side import compare_runs
from layerbisect.captures.errors import RecordError
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from tests.bisect.scores.making import Columns, run


def lowered(scores: Columns, _: np.random.Generator) -> Columns:
    scores["A"][1:] -= 0.1
    return scores


@pytest.mark.parametrize("seed", range(5))
def test_a_fixed_run_is_back_in_range(seed: int) -> None:
    fault, fixed, clean = run(seed, change=lowered), run(seed + 100), run(seed + 200)
    comparison = compare_runs([fault], [fixed], [clean])
    assert comparison.status == "within"
    (row,) = [r for r in comparison.rows if (r.pair, r.measure) == ("A-B0", "MAE")]
    assert row.before is not None and row.before > 0.09 > 0.01 > row.after


def test_a_run_that_is_not_fixed_is_out_of_range() -> None:
    comparison = compare_runs([run(1)], [run(2, change=lowered)], [run(3)])
    assert comparison.status == "out of range"
    out = {(r.pair, r.measure) for r in comparison.rows if r.within is False}
    assert {("A-B0", "MAE"), ("A-C0", "MAE"), ("A-B0", "signed mean")} <= out
    assert not [pair for pair, _ in out if pair == "B0-C0"]


def outliers(scores: Columns, _: np.random.Generator) -> Columns:
    scores["C0"][5:8] -= 3.0
    return scores


def test_prompts_with_outliers_beyond_the_controls_are_counted() -> None:
    many = run(1, responses=16), run(2, responses=16, change=outliers), run(3, responses=16)
    comparison = compare_runs(*([one] for one in many))
    (row,) = [r for r in comparison.rows if (r.pair, r.measure) == ("B0-C0", "outliers")]
    assert (row.after, row.within) == (8.0, False)


def test_four_prompts_are_too_few_for_outliers_but_not_for_the_tail() -> None:
    comparison = compare_runs([run(1)], [run(2, change=outliers)], [run(3)])
    found = {r.measure: r for r in comparison.rows if r.pair == "B0-C0"}
    assert (found["outliers"].after, found["outliers"].within) == (4.0, None)
    assert found["p99"].within is False
    assert "too few prompts or tokens to tell by outliers; the other measures can" in (
        comparison.notes
    )


@pytest.mark.parametrize("prompts", [(1, 4), (4, 3), (2, 2)])
def test_too_few_prompts_are_no_verdict(prompts: tuple[int, int]) -> None:
    fixed, clean = (run(seed, responses=2 * n) for seed, n in enumerate(prompts))
    comparison = compare_runs([run(9)], [fixed], [clean])
    assert comparison.status == "too few"
    assert not [row for row in comparison.rows if row.chance is not None or row.within]
    assert comparison.notes == (
        f"too few prompts to tell: the fixed run has {prompts[0]}, the control {prompts[1]}; "
        "give each at least 4",
    )


def test_groups_that_were_asked_the_same_are_one_prompt() -> None:
    record = run(2)
    calls = [replace(call, group=call.name, prompt=np.arange(9)) for call in record]
    assert compare_runs([run(1)], [ScoreRecord(record.info, calls)], [run(3)]).status == "too few"


def test_equal_scores_are_within() -> None:
    def equal(scores: Columns, _: np.random.Generator) -> Columns:
        return {name: scores["A"] for name in scores}

    one, other, lower = run(1, change=equal), run(2, change=equal), run(3, change=lowered)
    assert compare_runs([lower], [one], [other]).status == "within"
    assert compare_runs([one], [lower], [other]).status == "out of range"


@dataclass(frozen=True)
class Clean:
    """How a clean run is drawn: noise of three columns, and what it shares.

    ``prompt`` and ``response`` are the spread of the log of their noise; ``outliers`` the share of
    tokens with 12 times the noise; ``burst`` the chance of a response of 10 tokens in a row with 20
    times it; ``asked`` says that the same prompts are asked, each with its own noise.
    """

    prompts: tuple[int, int] = (8, 8)
    samples: int = 1
    tokens: tuple[tuple[int, int], tuple[int, int]] = ((64, 65), (64, 65))
    prompt: float = 0.0
    response: float = 0.3
    outliers: float = 0.005
    burst: float = 0.0
    asked: bool = False

    def run(self, generator: np.random.Generator, which: int, *, lower: float = 0.0) -> ScoreRecord:
        calls = []
        for number in range(self.prompts[which]):
            prompt = [number] if self.asked else generator.integers(0, 1 << 40, 4)
            own = np.random.default_rng(number) if self.asked else generator
            loud = 0.02 * np.exp(own.normal(0, self.prompt))
            for sample in range(self.samples):
                length = int(generator.integers(*self.tokens[which]))
                scores = self._scores(generator, loud, length)
                scores["A"][1:] -= lower
                calls.append(
                    Call.of(f"{number}.{sample}", prompt, [1] * length, scores, group=f"{number}")
                )
        info = RecordInfo(columns={name: Scoring() for name in ("A", "B0", "C0")})
        return ScoreRecord(info, calls)

    def _scores(self, generator: np.random.Generator, loud: float, length: int) -> Columns:
        size = loud * np.exp(generator.normal(0, self.response)) * np.ones((3, length))
        size *= np.where(generator.random((3, length)) < self.outliers, 12.0, 1.0)
        if generator.random() < self.burst:
            start = int(generator.integers(length))
            size[:, start : start + 10] *= 20.0
        noise = size * generator.standard_t(3, (3, length))
        exact = -generator.gamma(1.0, 1.2, length)
        return dict(zip(("A", "B0", "C0"), exact + noise, strict=True))


CLEAN = {
    "responses alike": Clean(),
    "longer responses in the fixed run": Clean(tokens=((400, 401), (64, 65))),
    "shorter responses in the fixed run": Clean((12, 12), tokens=((8, 60), (60, 400))),
    "four prompts, eight samples": Clean((4, 4), 8, prompt=0.7),
    "sixteen prompts, two samples": Clean((16, 16), 2, prompt=0.7),
    "the same prompts": Clean((8, 8), 2, prompt=1.0, asked=True),
    "a small control": Clean((32, 5), 2, prompt=1.0),
    "a small run": Clean((5, 32), 2, prompt=1.0),
    "outliers in a row": Clean((4, 4), 2, burst=0.15),
    "responses that differ much": Clean((6, 6), response=0.8),
}


@pytest.mark.parametrize("kind", CLEAN)
def test_clean_runs_are_not_out_of_range(kind: str) -> None:
    clean, pairs = CLEAN[kind], 40
    statuses = []
    for seed in range(pairs):
        generator = np.random.default_rng(seed)
        fixed, control = clean.run(generator, 0), clean.run(generator, 1)
        statuses.append(compare_runs([fixed], [fixed], [control]).status)
    # at 1 in 100, more than 2 of 40 come about once in 130 times
    assert statuses.count("out of range") <= 2
    assert statuses.count("within") >= pairs - 2


def test_two_prompts_of_many_samples_are_two() -> None:
    generator = np.random.default_rng(0)
    clean = Clean((2, 2), 16, prompt=0.5)
    fixed, control = clean.run(generator, 0), clean.run(generator, 1)
    assert compare_runs([fixed], [fixed], [control]).status == "too few"


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_left_of_a_fault_is_found_in_four_prompts(asked: bool) -> None:
    clean = Clean((4, 4), 2, tokens=((128, 129), (128, 129)), prompt=0.3, asked=asked)
    found = 0
    for seed in range(20):
        generator = np.random.default_rng(seed)
        left, control = clean.run(generator, 0, lower=0.1), clean.run(generator, 1)
        found += compare_runs([left], [left], [control]).status == "out of range"
    assert found >= 19


def test_without_a_control_nothing_is_said_to_be_back() -> None:
    comparison = compare_runs([run(1, change=lowered)], [run(2)])
    assert comparison.status == "no control"
    assert all(row.within is None for row in comparison.rows)


def test_the_next_update_is_part_of_it() -> None:
    def steps(seed: int, *, later: bool = True) -> list[ScoreRecord]:
        return [run(seed, step=0), *([run(seed + 50, step=1)] if later else [])]

    comparison = compare_runs(steps(1), steps(2), steps(3))
    assert {row.step for row in comparison.rows} == {0, 1}
    short = compare_runs(steps(1), steps(2, later=False), steps(3))
    assert "the fixed run has no scores at step 1: it was not seen past there" in short.notes


def test_one_column_is_nothing_to_compare() -> None:
    call = Call.of("one", [1], [2], {"A": [-1.0]})
    record = ScoreRecord(RecordInfo(columns={"A": Scoring()}), [call])
    with pytest.raises(RecordError, match="no two of A, B0 and C0"):
        compare_runs([record], [record])
