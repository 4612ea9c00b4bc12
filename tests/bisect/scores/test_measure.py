"""Measures of score differences: call by call they are what the whole array says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.bisect.scores import measure as score_measure
from layerbisect.bisect.scores.effect import EffectMeasure
from layerbisect.bisect.scores.measure import PairMeasure
from layerbisect.bisect.scores.repeats import RepeatMeasure
from layerbisect.captures.record.call import Call, Scoring

VALUE = st.floats(-20, 0, allow_subnormal=False)


def call(name: str, **scores: object) -> Call:
    length = len(next(iter(scores.values())))  # type: ignore[arg-type]
    mask = scores.pop("mask", None)
    return Call.of(name, [1, 2], np.arange(length), scores, mask=mask)


@st.composite
def runs(draw: st.DrawFn) -> list[Call]:
    made = []
    for number in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 9))
        values = [draw(st.lists(VALUE, min_size=n, max_size=n)) for _ in range(3)]
        mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        a, b, c = values
        made.append(call(f"c{number}", A=a, B0=b, C0=c, mask=mask))
    return made


@given(calls=runs())
def test_call_by_call_is_the_whole(calls: list[Call]) -> None:
    measure = PairMeasure("A", "B0")
    for one in calls:
        measure.add(one)
    report = measure.report()
    difference = np.concatenate([(c.scores["A"] - c.scores["B0"])[c.mask] for c in calls])
    if not len(difference):
        assert report is None
        return
    assert report is not None and report.exact_quantiles
    size = np.abs(difference)
    assert report.gap.rows == len(size)
    assert report.gap.mae == pytest.approx(size.mean())
    assert report.gap.signed_mean == pytest.approx(difference.mean(), abs=1e-12)
    assert report.gap.p95 == pytest.approx(np.quantile(size, 0.95))
    assert report.gap.max == size.max()
    assert sum(b.tokens for b in report.by_position) == len(size)
    assert sum(b.tokens * b.mae for b in report.by_position) == pytest.approx(size.sum())
    worst = [abs(w.difference) for w in report.worst]
    assert worst == pytest.approx(sorted(size, reverse=True)[:10])
    parts = [part.rows for part in (report.first_token, report.later) if part]
    assert sum(parts) == len(size)


def test_quantiles_of_many_differences_stay_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_measure, "EXACT", 1000)
    generator = np.random.default_rng(0)
    measure, all_of = PairMeasure("A", "B0"), []
    for number in range(40):
        noise = generator.standard_t(3, 500) * 0.01
        all_of.append(noise)
        measure.add(call(str(number), A=noise - 5, B0=np.full(500, -5.0)))
    report = measure.report()
    assert report is not None and not report.exact_quantiles
    size = np.abs(np.concatenate(all_of))
    assert report.gap.p95 == pytest.approx(np.quantile(size, 0.95), rel=1e-3)
    assert report.gap.p99 == pytest.approx(np.quantile(size, 0.99), rel=3e-3)
    assert report.gap.max == pytest.approx(size.max())


def test_what_the_mask_leaves_out_is_not_measured() -> None:
    measure = PairMeasure("A", "B0")
    measure.add(call("c", A=[-1.0, np.nan, -9.0], B0=[-1.5, -1.0, -1.0], mask=[1, 0, 0]))
    report = measure.report()
    assert report is not None
    assert (report.gap.rows, report.gap.max) == (1, 0.5)
    assert report.worst[0].position == 0


def test_repeats_are_told_apart_by_what_they_share() -> None:
    columns = {
        "B0": Scoring(worker="one"),
        "B1": Scoring(worker="one"),
        "B2": Scoring(worker="two"),
        "B3": Scoring(worker="one", through="router"),
    }
    repeats = RepeatMeasure("B", columns, 0.01)
    repeats.add(call("c", B0=[-1.0, -2.0], B1=[-1.0, -2.25], B2=[-1.5, -2.0], B3=[-1.0, -2.0]))
    found = {report.kind: report for report in repeats.reports()}
    assert found["one worker"].pairs == ("B0-B1",)
    assert found["one worker"].mae == pytest.approx(0.125)
    assert found["workers"].pairs == ("B0-B2", "B1-B2")
    assert set(found["router"].pairs) == {"B0-B3", "B1-B3", "B2-B3"}
    (moved,) = found["one worker"].moved
    assert (moved.call, moved.position, moved.token) == ("c", 1, 1)
    assert (moved.first, moved.second, found["one worker"].moved_tokens) == (-2.0, -2.25, 1)


def test_equal_repeats_move_nothing() -> None:
    repeats = RepeatMeasure("C", {"C0": Scoring(), "C1": Scoring()}, 0.0)
    repeats.add(call("c", C0=[-1.0], C1=[-1.0]))
    (report,) = repeats.reports()
    assert (report.mae, report.max, report.moved_tokens, report.kind) == (0.0, 0.0, 0, "trainer")
    assert RepeatMeasure("B", {"B0": Scoring()}, 0.0).reports() == ()


@given(calls=runs())
def test_effect_is_what_its_formulas_say(calls: list[Call]) -> None:
    effect = EffectMeasure("A", "C0", 0.2)
    for one in calls:
        effect.add(one)
    report = effect.report()
    logs = [(c.scores["C0"] - c.scores["A"])[c.mask] for c in calls if c.mask.any()]
    if not logs:
        assert report is None
        return
    assert report is not None
    log_ratio = np.concatenate(logs)
    ratio = np.exp(log_ratio)
    assert report.ratio_mean == pytest.approx(ratio.mean())
    assert report.clipped_low == pytest.approx((ratio < 0.8).mean())
    assert report.clipped_high == pytest.approx((ratio > 1.2).mean())
    whole = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
    assert report.effective_sample_size == pytest.approx(whole)
    weights = np.exp(np.array([each.sum() for each in logs]))
    by_response = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert report.effective_responses == pytest.approx(by_response)
    assert report.k1 == pytest.approx(-log_ratio.mean(), abs=1e-12)
    assert report.k3 == pytest.approx((ratio - 1 - log_ratio).mean(), rel=1e-6, abs=1e-12)


def test_equal_scores_do_nothing_to_training() -> None:
    effect = EffectMeasure("A", "C0", 0.2)
    effect.add(call("c", A=[-1.0, -2.0], C0=[-1.0, -2.0]))
    report = effect.report()
    assert report is not None
    assert (report.effective_sample_size, report.effective_responses) == (1.0, 1.0)
    assert (report.k1, report.k3, report.clipped_low, report.clipped_high) == (0, 0, 0, 0)


def test_a_gap_without_end_stays_finite() -> None:
    effect = EffectMeasure("A", "C0", 0.2)
    effect.add(call("c", A=[-1.0, -1.0], C0=[-900.0, -1.0]))
    report = effect.report()
    assert report is not None and np.isfinite(report.k3) and report.clipped_low == 0.5
