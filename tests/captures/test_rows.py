"""Rows and the keys of the prefixes that they have seen."""

from collections.abc import Sequence
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.rows import Rows, parent_keys, prefix_keys

# a small alphabet, so that prefixes are often shared and often differ in the last token alone
TOKENS = st.lists(st.integers(0, 2), max_size=6)
SEQUENCES = st.lists(st.tuples(TOKENS, st.sampled_from(["", "a", "b"])), min_size=1, max_size=6)


def rows_of(sequences: Sequence[Sequence[int]]) -> Rows:
    """Lay whole sequences end to end."""
    return Rows.of(
        [i for i, tokens in enumerate(sequences) for _ in tokens],
        [p for tokens in sequences for p in range(len(tokens))],
        [t for tokens in sequences for t in tokens],
    )


@given(SEQUENCES)
def test_keys_are_equal_exactly_when_prefix_and_salt_are(
    sequences: list[tuple[list[int], str]],
) -> None:
    rows = rows_of([tokens for tokens, _ in sequences])
    keys = prefix_keys(rows, rows, [salt for _, salt in sequences])
    assert keys.known.all()
    meaning = [
        (salt, tuple(tokens[: p + 1])) for tokens, salt in sequences for p in range(len(tokens))
    ]
    for a, b in combinations(range(len(rows)), 2):
        assert (keys.key[a] == keys.key[b]) == (meaning[a] == meaning[b])


def test_swapped_or_shifted_tokens_change_the_key() -> None:
    rows = rows_of([[1, 2], [2, 1], [0, 1, 2], [3], [1, 1, 1], [1, 1]])
    keys = prefix_keys(rows, rows, [""] * 6)
    # [1] is there three times, and [1, 1] twice
    assert len(np.unique(keys.key)) == len(rows) - 3


def test_no_two_keys_of_many_collide_in_either_lane() -> None:
    random = np.random.default_rng(0)
    rows = rows_of([random.integers(0, 2, 64).tolist() for _ in range(2000)])
    keys = prefix_keys(rows, rows, [""] * 2000)
    distinct = len(np.unique(keys.key))
    assert len(np.unique(keys.key["high"])) == distinct
    assert len(np.unique(keys.key["low"])) == distinct


@given(SEQUENCES, st.randoms(use_true_random=False))
def test_keys_do_not_depend_on_order_chunks_or_passes(
    sequences: list[tuple[list[int], str]], random: Random
) -> None:
    rows, salts = rows_of([t for t, _ in sequences]), [salt for _, salt in sequences]
    expected = prefix_keys(rows, rows, salts)
    order = list(range(len(rows)))
    random.shuffle(order)
    cut = len(order) // 2
    # the second half of a shuffled pass, its earlier tokens known from elsewhere, twice
    part, rest = rows.take(np.array(order[cut:], int)), rows.take(np.array(order[:cut], int))
    seen = Rows.concatenate([rest, part, rest])
    keys = prefix_keys(part, seen, salts)
    assert keys.known.all()
    np.testing.assert_array_equal(keys.key, expected.key[order[cut:]])


@given(st.lists(st.integers(0, 9), min_size=2, max_size=8), st.data())
def test_rows_after_a_hole_are_not_known(tokens: list[int], data: st.DataObject) -> None:
    hole = data.draw(st.integers(0, len(tokens) - 2))
    broken = rows_of([tokens]).take(np.arange(len(tokens)) != hole)
    rows = Rows.concatenate([broken, Rows.of([1, 1, 1], [0, 1, 2], [4, 5, 6])])
    keys = prefix_keys(rows, rows, ["", ""])
    np.testing.assert_array_equal(
        keys.known, [p < hole for p in range(len(tokens)) if p != hole] + [True] * 3
    )


def test_hole_is_filled_by_tokens_seen_elsewhere() -> None:
    rows = Rows.of([0, 0], [2, 3], [7, 8])
    assert not prefix_keys(rows, rows, [""]).known.any()
    cached = Rows.of([0, 0], [0, 1], [5, 6])
    whole = rows_of([[5, 6, 7, 8]])
    keys = prefix_keys(rows, Rows.concatenate([cached, rows]), [""])
    assert keys.known.all()
    np.testing.assert_array_equal(keys.key, prefix_keys(whole, whole, [""]).key[2:])


def test_two_tokens_at_one_position_are_refused() -> None:
    rows = Rows.of([0, 1, 1], [0, 4, 4], [3, 8, 9])
    sentence = "sequence 'b' holds two tokens at position 4: 8 and 9"
    with pytest.raises(CaptureError, match=sentence):
        prefix_keys(rows, rows, ["", ""], ["a", "b"])
    with pytest.raises(CaptureError, match="sequence 1 holds two tokens"):
        prefix_keys(rows.take(np.array([0, 1])), rows, ["", ""])


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=8), st.sampled_from(["", "image"]))
def test_parent_key_is_the_key_of_the_row_before(tokens: list[int], salt: str) -> None:
    rows = rows_of([tokens])
    keys = prefix_keys(rows, rows, [salt])
    np.testing.assert_array_equal(parent_keys(keys.key, rows)[1:], keys.key[:-1])


def test_no_rows_have_no_keys() -> None:
    keys = prefix_keys(Rows.empty(), Rows.empty(), [])
    assert len(keys.key) == len(keys.known) == 0
    assert len(Rows.concatenate([])) == 0


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (([0, 0], [0], [1]), "unequal lengths"),
        (([0], [-1], [1]), "position must lie from 0 to 2147483647, got -1"),
        (([0], [0], [-5]), "token must lie from 0"),
        (([2**31], [0], [1]), "sequence must lie"),
        ((np.array([2**40]), [0], [1]), "sequence must lie"),
        (([0], [0], np.array([2**63], np.uint64)), "token must lie"),
        (([0], [0], [1.5]), "token must be integers, got float64"),
        (([True], [0], [1]), "sequence must be integers, got bool"),
        ((["a"], [0], [1]), "sequence must be integers"),
    ],
)
def test_what_are_no_row_numbers_is_refused(
    columns: tuple[object, object, object], sentence: str
) -> None:
    with pytest.raises(CaptureError, match=sentence):
        Rows.of(*columns)
