"""The published figures, recomputed by the code that judges."""

import numpy as np
import pytest

from layerbisect.bisect.scores.measure import PairMeasure
from layerbisect.bisect.scores.repeats import RepeatMeasure
from layerbisect.captures.record.call import Call, Scoring
from scripts import published_scores as published


def token(scores: dict[str, float]) -> Call:
    return Call.of("sample-3", [1], [374], {name: [value] for name, value in scores.items()})


@pytest.mark.parametrize("pair", published.OUTLIER_DIFFERENCES)
def test_the_outlier_token_to_six_printed_digits(pair: tuple[str, str]) -> None:
    measure = PairMeasure(*pair)
    measure.add(token(dict(published.OUTLIER)))
    report = measure.report()
    assert report is not None
    said = published.OUTLIER_DIFFERENCES[pair]
    assert f"{report.gap.signed_mean:+.6f}" == said
    # of one token, mean, percentiles and maximum are all its absolute difference
    sizes = {report.gap.mae, report.gap.p95, report.gap.p99, report.gap.max}
    assert {f"{size:.6f}" for size in sizes} == {said.lstrip("+")}


@pytest.mark.parametrize("pair", published.STALE_DIFFERENCES)
def test_the_stale_token_to_nine_printed_digits(pair: tuple[str, str]) -> None:
    measure = PairMeasure(*pair)
    measure.add(token(dict(published.STALE_TOKEN)))
    report = measure.report()
    assert report is not None
    assert f"{report.gap.mae:.9f}" == published.STALE_DIFFERENCES[pair]


def test_case_1_closes_from_its_split_by_position() -> None:
    each = published.TOKENS // published.RESPONSES
    error = np.full(each, published.LATER_TOKENS)
    error[0] = published.FIRST_TOKEN
    measure = PairMeasure("A", "B0")
    for number in range(published.RESPONSES):
        scores = {"A": -1 - error, "B0": np.full(each, -1.0)}
        measure.add(Call.of(f"s{number}", [1], np.zeros(each, np.int64), scores))
    report = measure.report()
    assert report is not None and report.first_token and report.later
    assert f"{report.gap.mae:.6f}" == f"{published.CASE_1[1].a_b:.6f}"
    assert f"{report.first_token.mae:.8f}" == f"{published.FIRST_TOKEN:.8f}"
    assert f"{report.later.mae:.6f}" == f"{published.LATER_TOKENS:.6f}"


def test_five_passes_are_ten_pairs() -> None:
    columns = {f"B{n}": Scoring(worker="w") for n in range(5)}
    repeats = RepeatMeasure("B", columns, 0.01)
    repeats.add(Call.of("one", [1], [2], {name: [-1.0 - int(name[1])] for name in columns}))
    (report,) = repeats.reports()
    assert len(report.pairs) == 10
    # differences of 1, 2, 3 and 4 nat: four, three, two and one times
    assert report.mae == pytest.approx(2.0)


def test_everything_recomputed_meets_what_was_published() -> None:
    rows = published.recomputed()
    assert len(rows) >= 18
    assert [(what, said) for what, said, _ in rows] == [(what, found) for what, _, found in rows]


def test_every_published_run_obeys_the_triangle() -> None:
    for name, least, a_c, most in published.bounds():
        assert least <= a_c <= most, name
