"""What misled the tests for places: samples of calls, short responses, copies, sure tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.table import ALL, PLACES
from layerbisect.captures.record.call import Call
from tests.bisect.shapes.place_pairs import Array, pair

NAMES = ("shift", "chunk order", "swapped samples", "mispaired samples", *PLACES)
SHARES = (0.0, 0.5, 0.7, 0.85)


def peaked(random: np.random.Generator, calls: int, tokens: int, sure: float) -> Array:
    """Scores of which a share is near 0, float64 [call, token] (nat)."""
    certain = -np.exp(-random.uniform(5.0, 16.0, (calls, tokens)))
    unsure = -random.exponential(1.2, (calls, tokens))
    scores: Array = np.where(random.random((calls, tokens)) < sure, certain, unsure)
    return scores


def noisy(random: np.random.Generator, scores: Array, level: float | Array) -> Array:
    """Move the token's logit against the others; the noise has heavy tails."""
    noise = random.standard_t(3, scores.shape) * random.lognormal(0.0, 0.3, (len(scores), 1))
    noise *= np.where(random.random(scores.shape) < 0.005, 12.0, 1.0)
    odds = scores - np.log(-np.expm1(scores)) + level * noise
    moved: Array = -np.logaddexp(0.0, -odds)
    return moved


def sides(first: Array, second: Array, **how: Any) -> PairSample:
    return pair(list(first), list(second), **{"tokens": np.arange(first.size), **how})


def found(sample: PairSample) -> dict[str, Finding]:
    return {name: finding for name in NAMES if (finding := ALL[name](sample)) is not None}


def seen(first: list[Array], second: list[Array]) -> PairSample:
    """Every other call of those that were recorded, as where many are sampled."""
    calls = [
        Call.of(f"call {i}", [i], [7] * len(a), {"A": a, "B0": b})
        for i, (a, b) in enumerate(zip(first, second, strict=True))
    ]
    return PairSample.of(calls[::2], "A", "B0")


@pytest.mark.parametrize("name", ["swapped samples", "some responses", "a few tokens against all"])
def test_responses_are_called_by_name_whichever_calls_are_seen(name: str) -> None:
    random = np.random.default_rng(0)
    second = [-random.exponential(1.0, 16 if i == 8 else 64) for i in range(24)]
    first = [scores + random.normal(0.0, 0.001, len(scores)) for scores in second]
    if name == "swapped samples":
        first[4], first[10] = first[10], first[4]
    else:
        wrong, apart = (8, 4.0) if name.startswith("a few") else (4, 0.2)
        first[wrong] += random.normal(0.0, apart, len(first[wrong]))
    finding = ALL[name](seen(first, second))
    assert finding is not None
    assert {
        "swapped samples": "responses call 4, call 10",
        "some responses": "response call 4",
        "a few tokens against all": "stand in response call 8",
    }[name] == finding.where
    if name == "swapped samples":
        assert finding.evidence[0] == "call 4 holds call 10, call 10 holds call 4"


@pytest.mark.parametrize("sure", SHARES)
@pytest.mark.parametrize(
    "name",
    ["some responses", "from a position on", "multiples of a chunk or page", "first token only"],
)
def test_a_fault_is_found_however_many_tokens_are_sure(name: str, sure: float) -> None:
    random = np.random.default_rng(0)
    # few of the first tokens tell
    true = peaked(random, 32 if name != "first token only" else 96, 250, sure)
    call, index = np.indices(true.shape)
    there = {
        "some responses": call % 4 == 1,
        "from a position on": index >= 128,
        "multiples of a chunk or page": index % 16 == 15,
        "first token only": index == 0,
    }[name]
    first = noisy(random, true, np.where(there, 2.0, 0.03))
    findings = found(sides(first, noisy(random, true, 0.03)))
    assert list(findings) == [name]
    assert findings[name].false_alarm <= 1e-6
    assert findings[name].tokens == pytest.approx(there.sum(), rel=0.1)


@pytest.mark.parametrize("sure", [0.0, 0.5, 0.9])
def test_peaked_scores_raise_nothing(sure: float) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        true = peaked(random, int(random.choice([4, 16])), int(random.choice([60, 256])), sure)
        level = float(random.choice([0.005, 0.03, 0.1]))
        assert not found(sides(noisy(random, true, level), noisy(random, true, level))), seed


@pytest.mark.parametrize(("place", "name"), [(0, "first token only"), (-1, "from a position on")])
def test_other_scores_where_every_response_is_sure_are_found(place: int, name: str) -> None:
    random = np.random.default_rng(0)
    true = peaked(random, 32, 100, 0.4)
    true[:, place] = -1e-5
    first, second = noisy(random, true, 0.03), noisy(random, true, 0.03)
    first[:, place] = -2.0 - random.exponential(2.0, 32)
    findings = found(sides(first, second))
    assert name in findings and findings[name].false_alarm <= 1e-6


def test_outliers_where_every_response_is_sure_raise_nothing() -> None:
    random = np.random.default_rng(0)
    true = peaked(random, 128, 96, 0.3)
    here = np.arange(96) % 16 == 0
    true[:, here] = -1e-5
    first, second = noisy(random, true, 0.03), noisy(random, true, 0.03)
    first[random.random(first.shape) < 0.02] -= 0.7
    assert not found(sides(first, second))


@pytest.mark.parametrize(("calls", "tokens"), [(100, 1), (200, 2), (64, 8)])
def test_short_responses_raise_nothing(calls: int, tokens: int) -> None:
    for seed in range(40):
        random = np.random.default_rng(seed)
        true = peaked(random, calls, tokens, 0.5)
        level = (0.04, 0.12)[seed % 2]
        assert not found(sides(noisy(random, true, level), noisy(random, true, level))), seed


@pytest.mark.parametrize("same", [80, 70])
def test_copies_of_a_response_are_not_swapped(same: int) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        true, tokens = peaked(random, 64, 80, 0.4), np.arange(64 * 80).reshape(64, 80)
        for values in (true, tokens):
            values[:, :same] = np.repeat(values[::8, :same], 8, axis=0)
        prompt = [i // 8 for i in range(64)]
        first, second = (
            noisy(random, true, 0.06 * random.lognormal(0.0, 0.6, (64, 1))) for _ in range(2)
        )
        assert not found(sides(first, second, tokens=tokens, prompt=prompt)), seed


def test_samples_that_begin_alike_are_swapped_all_the_same() -> None:
    random = np.random.default_rng(0)
    true, tokens = peaked(random, 16, 80, 0.4), np.arange(16 * 80).reshape(16, 80)
    for values in (true, tokens):
        values[:, :30] = np.repeat(values[::8, :30], 8, axis=0)
    first, second = noisy(random, true, 0.02), noisy(random, true, 0.02)
    first[[2, 5]] = first[[5, 2]]
    finding = found(sides(first, second, tokens=tokens, prompt=[i // 8 for i in range(16)]))
    assert finding["swapped samples"].where == "responses s2, s5"
