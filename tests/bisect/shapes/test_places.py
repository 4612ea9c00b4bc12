"""Faults of place, planted in the scores of a real model, are found where they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.table import ALL, PLACES
from tests.bisect.shapes.place_pairs import AWKWARD, Array, Scored, awkward, clean, pair, score

CALLS = 8
PROMPTS = (10, 14, 19, 24, 29, 35, 41, 50)
SURE = 1e-6

NAMES = ("shift", "chunk order", "swapped samples", "mispaired samples", *PLACES)
TESTS = [ALL[name] for name in NAMES]


@pytest.fixture(scope="module")
def scored(small_llama_dir: Path) -> Scored:
    return score(small_llama_dir)


@pytest.fixture
def sides(scored: Scored) -> tuple[Array, Array]:
    """Eight responses of 128 tokens, in bfloat16 by two kinds of attention."""
    return scored.first[:CALLS].copy(), scored.second[:CALLS].copy()


def found(sample: PairSample) -> dict[str, Finding]:
    """What the tests find, by the test's name."""
    findings = [finding for test in TESTS if (finding := test(sample)) is not None]
    assert all(0.0 <= f.false_alarm <= 1.0 and 0.0 <= f.explains <= 1.0 for f in findings)
    return {finding.test: finding for finding in findings}


def only(sample: PairSample, name: str) -> Finding:
    """The one finding, which must be of this test and beyond doubt."""
    findings = found(sample)
    assert list(findings) == [name]
    assert findings[name].false_alarm <= SURE
    return findings[name]


@pytest.mark.parametrize("lag", [1, -1, 3, -8, 20])
def test_a_shift_is_found_with_its_lag(lag: int, sides: tuple[Array, Array]) -> None:
    first, second = sides
    shifted = np.roll(first, -lag, axis=1)
    # what stands beyond the ends are scores of other tokens
    ends = slice(128 - lag, None) if lag > 0 else slice(None, -lag)
    shifted[:, ends] = -np.random.default_rng(0).exponential(2.0, shifted[:, ends].shape)
    finding = only(pair(shifted, second), "shift")
    assert finding.summary == f"A at token i is B0 at token i{lag:+d}"
    assert finding.where == ""


def test_a_roll_is_told_from_a_shift(sides: tuple[Array, Array]) -> None:
    first, second = sides
    finding = only(pair(np.roll(first, -1, axis=1), second), "shift")
    assert "rolled" in finding.summary


def test_some_shifted_responses_are_listed(sides: tuple[Array, Array]) -> None:
    first, second = sides
    first[[2, 5]] = np.roll(first[[2, 5]], -2, axis=1)
    assert found(pair(first, second))["shift"].where == "responses s2, s5"


@pytest.mark.parametrize("order", [[0, 3, 1, 2], [0, 2, 3, 1], [0, 1, 4, 5, 6, 7, 2, 3], [1, 0]])
def test_chunks_in_another_order_are_found(order: list[int], sides: tuple[Array, Array]) -> None:
    first, second = sides
    chunks = np.split(first, len(order), axis=1)
    sample = pair(np.concatenate([chunks[i] for i in order], axis=1), second)
    # where the first chunks are in place, the gap also begins at a position
    finding = found(sample)["chunk order"]
    assert finding.false_alarm <= SURE
    assert finding.explains > 0.7
    moved = next(i for i, chunk in enumerate(order) if i != chunk)
    size = 128 // len(order)
    there = order[moved] * size
    assert f"holds {there}-" in finding.evidence[-1]


def test_swapped_samples_are_named(sides: tuple[Array, Array]) -> None:
    first, second = sides
    first[[2, 5]] = first[[5, 2]]
    finding = only(pair(first, second), "swapped samples")
    assert finding.where == "responses s2, s5"
    assert finding.evidence[0] == "s2 holds s5, s5 holds s2"


def test_a_rotated_batch_is_swapped(sides: tuple[Array, Array]) -> None:
    first, second = sides
    finding = only(pair(np.roll(first, 1, axis=0), second), "swapped samples")
    assert "in another order" in finding.summary
    assert finding.where == ""


@pytest.mark.parametrize("wrong", [[3], [3, 11], [0, 5, 9]])
def test_responses_under_another_prompt_are_mispaired(wrong: list[int], scored: Scored) -> None:
    second = scored.second[:16].copy()
    second[wrong] = scored.elsewhere[wrong]
    finding = only(pair(scored.first[:16], second), "mispaired samples")
    assert finding.where in (
        f"responses {', '.join(f's{i}' for i in wrong)}",
        f"response s{wrong[0]}",
    )


def test_scores_of_other_tokens_are_unrelated(sides: tuple[Array, Array]) -> None:
    first, second = sides
    random = np.random.default_rng(0)
    other = np.stack([random.permutation(row) for row in second])
    only(pair(first, other), "unrelated scores")


def test_a_first_token_apart_is_found(sides: tuple[Array, Array]) -> None:
    first, second = sides
    first[:, 0] -= 0.5
    finding = only(pair(first, second), "first token only")
    assert finding.where == "response position 0"
    assert finding.mae == pytest.approx(0.5, abs=0.05)


def test_samples_of_one_prompt_count_once_at_their_first_token(scored: Scored) -> None:
    first, second = scored.first[:16].copy(), scored.second[:16].copy()
    # one prompt whose prefill happened to round badly, and all samples begin with one token
    first[:, 0], second[:, 0] = first[0, 0] + 0.5, second[0, 0]
    one = pair(first, second, prompt=[0] * 16)
    assert not found(one)
    sixteen = pair(first, second)
    assert list(found(sixteen)) == ["first token only"]


def test_all_but_the_first_token_are_found(sides: tuple[Array, Array]) -> None:
    first, second = sides
    first[:, 1:] -= 0.10
    finding = only(pair(first, second), "all but the first token")
    assert finding.where == "response positions >= 1"


@pytest.mark.parametrize("start", [16, 40, 96, 120])
def test_a_gap_from_a_position_on_is_found(start: int, sides: tuple[Array, Array]) -> None:
    first, second = sides
    first[:, start:] += np.random.default_rng(start).normal(0.0, 0.4, (CALLS, 128 - start))
    finding = only(pair(first, second), "from a position on")
    if start == 120:
        assert finding.where == "the last 8 response tokens"
    else:
        assert finding.where.startswith(f"response positions >= {start} ")


def test_a_gap_from_a_place_in_the_sequence_on_is_found(sides: tuple[Array, Array]) -> None:
    first, second = sides
    random = np.random.default_rng(0)
    for row, prompt in zip(first, PROMPTS, strict=True):
        row[96 - prompt :] += random.normal(0.0, 0.4, 128 - 96 + prompt)
    finding = only(pair(first, second, prompts=PROMPTS), "from a position on")
    assert finding.where == "sequence positions >= 96"


def test_the_last_tokens_of_responses_of_any_length_are_found(sides: tuple[Array, Array]) -> None:
    first, second = sides
    lengths = (70, 80, 90, 100, 110, 115, 120, 128)
    random = np.random.default_rng(0)
    for row, length in zip(first, lengths, strict=True):
        row[length - 3 : length] -= 0.2 + random.exponential(1.0, 3)
    sample = pair(*([row[:n] for row, n in zip(side, lengths, strict=True)] for side in sides))
    assert only(sample, "from a position on").where == "the last 3 response tokens"


@pytest.mark.parametrize(("period", "residue"), [(16, 0), (32, 31), (8, 7), (2, 1)])
def test_a_gap_at_multiples_is_found(period: int, residue: int, sides: tuple[Array, Array]) -> None:
    first, second = sides
    random = np.random.default_rng(0)
    for row, prompt in zip(first, PROMPTS, strict=True):
        here = (np.arange(128) + prompt) % period == residue
        row[here] += random.normal(0.0, 0.5, here.sum())
    finding = only(pair(first, second, prompts=PROMPTS), "multiples of a chunk or page")
    assert finding.where == f"sequence positions {residue} modulo {period}"


def test_alternating_blocks_are_found(sides: tuple[Array, Array]) -> None:
    first, second = sides
    random = np.random.default_rng(0)
    for row, prompt in zip(first, PROMPTS, strict=True):
        here = (np.arange(128) + prompt) // 16 % 2 == 1
        row[here] += random.normal(0.0, 0.4, here.sum())
    finding = only(pair(first, second, prompts=PROMPTS), "multiples of a chunk or page")
    assert finding.where == "odd blocks of 16 sequence positions"


def test_labels_rolled_inside_parallel_chunks_are_found(sides: tuple[Array, Array]) -> None:
    first, second = sides
    random = np.random.default_rng(0)
    for row, prompt in zip(first, PROMPTS, strict=True):
        size = -(-(128 + prompt) // 4)
        here = (np.arange(128) + prompt) % size == size - 1
        row[here] = -3.0 - random.exponential(4.0, here.sum())
    finding = only(pair(first, second, prompts=PROMPTS), "multiples of a chunk or page")
    assert finding.where == "the last token of each of 4 equal parts of the sequence"


def test_calls_with_a_cached_prefix_are_told_from_others(scored: Scored) -> None:
    random = np.random.default_rng(0)
    cached = np.where(np.arange(32) % 2 == 0, 16, 0)
    first = scored.first[:32].copy()
    first[cached > 0] += random.normal(0.0, 0.3, (16, 128))
    finding = found(pair(first, scored.second[:32], cached=cached.tolist()))["cached prefix"]
    assert finding.where == "calls with a cached prefix in A"
    assert finding.false_alarm <= SURE


def test_tokens_inside_a_cached_prefix_are_told_from_later_ones(
    sides: tuple[Array, Array],
) -> None:
    first, second = sides
    cached = [40, 56, 64, 0, 80, 30, 100, 64]
    random = np.random.default_rng(0)
    for row, count in zip(first, cached, strict=True):
        row[: max(0, count - 24)] = -random.exponential(2.0, max(0, count - 24))
    finding = found(pair(first, second, cached=cached))["cached prefix"]
    assert finding.where == "positions inside the cached prefix of A"
    assert finding.false_alarm <= SURE


def test_a_prefix_that_all_calls_have_is_not_blamed(sides: tuple[Array, Array]) -> None:
    first, second = sides
    first += np.random.default_rng(0).normal(0.0, 0.3, first.shape)
    assert not found(pair(first, second, cached=[16] * CALLS))


def test_whole_responses_apart_are_told_by_their_group(scored: Scored) -> None:
    random = np.random.default_rng(0)
    first = scored.first[:48].copy()
    groups = [f"prompt {i // 2}" for i in range(48)]
    chosen = [group in ("prompt 3", "prompt 9", "prompt 20") for group in groups]
    first[chosen] += random.normal(0.0, 0.3, (6, 128))
    finding = found(pair(first, scored.second[:48], groups=groups))["some responses"]
    assert finding.where == "responses of groups prompt 20, prompt 3, prompt 9"


def test_sound_pairs_raise_nothing(scored: Scored) -> None:
    for seed in range(40):
        assert not found(clean(scored, np.random.default_rng(seed))), seed


@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_noise_raises_nothing(kind: str, scored: Scored) -> None:
    for seed in range(5):
        assert not found(awkward(kind, scored, np.random.default_rng(seed))), seed


def test_too_few_or_equal_scores_raise_nothing(sides: tuple[Array, Array]) -> None:
    first, second = sides
    assert not found(pair(second, second))
    assert not found(pair(first[:1, :5], second[:1, :5]))
    assert not found(pair(first[:1, :1], second[:1, :1] + 3.0))
    assert not found(pair(np.full_like(first, np.nan), second))
