"""Two runs side by side: back within the control's range, or not."""

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
    comparison = compare_runs([fault], [fixed], [clean], seed=seed)
    assert comparison.status == "within"
    (row,) = [r for r in comparison.rows if (r.pair, r.measure) == ("A-B0", "MAE")]
    assert row.before is not None and row.before > 0.09 > 0.01 > row.after


def test_a_run_that_is_not_fixed_is_out_of_range() -> None:
    comparison = compare_runs([run(1)], [run(2, change=lowered)], [run(3)])
    assert comparison.status == "out of range"
    out = {(r.pair, r.measure) for r in comparison.rows if r.within is False}
    assert {("A-B0", "MAE"), ("A-C0", "MAE"), ("A-B0", "signed mean")} <= out
    assert not [pair for pair, _ in out if pair == "B0-C0"]


def test_outliers_beyond_the_controls_are_counted() -> None:
    def outliers(scores: Columns, _: np.random.Generator) -> Columns:
        scores["C0"][5:8] -= 3.0
        return scores

    comparison = compare_runs([run(1)], [run(2, change=outliers)], [run(3)])
    (row,) = [r for r in comparison.rows if (r.pair, r.measure) == ("B0-C0", "outliers")]
    assert (row.after, row.within) == (24.0, False)


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
