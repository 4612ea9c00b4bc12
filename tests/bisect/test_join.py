"""Rows are joined by the prefix that they have seen, whatever the layout."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.bisect.join import Joined, join, repeats
from layerbisect.captures.errors import LayerBisectError, TokenMismatchError
from layerbisect.captures.store import Capture
from tests.bisect.making import Line, write_lines

Tokens = tuple[int, ...]
POINT = "layers.0.input"

# few different tokens, so that sequences share prefixes and repeat each other
SEQUENCES = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple), min_size=1, max_size=5
)


def prefixes(sequences: Sequence[Tokens]) -> set[Tokens]:
    return {one[: end + 1] for one in sequences for end in range(len(one))}


def value_of(prefix: Tokens) -> float:
    """A number that only rows of this prefix have."""
    return float(sum((token + 1) * 4**place for place, token in enumerate(prefix)))


@st.composite
def layouts(draw: st.DrawFn, sequences: Sequence[Tokens]) -> list[list[Line]]:
    """Lay sequences out in passes: whole, in chunks or token by token, packed and in any order."""
    waiting: list[list[Line]] = []
    for number in draw(st.permutations(range(len(sequences)))):
        one = sequences[number]
        lines = [
            Line(f"q{number}", place, token, value_of(one[: place + 1]))
            for place, token in enumerate(one)
        ]
        waiting.append(lines)
    passes: list[list[Line]] = []
    while any(waiting):
        packed: list[Line] = []
        for lines in waiting:
            taken = len(lines) - draw(st.integers(0, len(lines)))
            packed += lines[:taken]
            del lines[:taken]
        if packed:
            passes.append(packed)
    return passes


def opened(passes: Sequence[Sequence[Line]], label: str) -> Capture:
    # points are read from the files later, so these go when the test run does
    return write_lines(Path(tempfile.mkdtemp(dir=_folder())) / label, passes, label=label)


@cache
def _folder() -> str:
    folder = tempfile.mkdtemp(prefix="join-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def check_chains(joined: Joined, capture: Capture, whole: set[Tokens]) -> None:
    """Every joined row with a whole prefix is fresh once, in a sequence that counts from 0."""
    chains = joined.chains
    assert sum(chains.lengths) == len(chains.row) == len(chains.fresh)
    start, seen = 0, []
    for length in chains.lengths:
        part = slice(start, start + length)
        tokens = tuple(chains.token[part].tolist())
        assert chains.position[part].tolist() == list(range(length))
        assert chains.target[part].tolist() == [*tokens[1:], -1]
        assert tokens in whole
        values = capture.read(POINT, joined.rollout[chains.row[part]])[:, 0]
        assert values.tolist() == [value_of(tokens[: end + 1]) for end in range(length)]
        seen += [tokens[: e + 1] for e in range(length) if chains.fresh[part][e]]
        start += length
    assert sorted(seen) == sorted(whole)
    # each token that follows another is scored once
    assert int(chains.scored.sum()) == sum(len(prefix) > 1 for prefix in whole)


@given(st.data(), SEQUENCES)
def test_any_two_layouts_of_the_same_tokens_join(data: st.DataObject, given: list[Tokens]) -> None:
    one = opened(data.draw(layouts(given)), "rollout")
    two = opened(data.draw(layouts(given)), "trainer")
    joined = join(one, two)
    whole = prefixes(given)
    assert len(joined) == len(whole)
    assert joined.left_out == joined.keyless == 0
    first = one.read(POINT, joined.rollout)[:, 0]
    second = two.read(POINT, joined.trainer)[:, 0]
    assert sorted(first.tolist()) == sorted(map(value_of, whole))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(joined.score_rollout, joined.score_trainer)
    assert sorted(-joined.score_rollout) == sorted(value_of(p) for p in whole if len(p) > 1)
    check_chains(joined, one, whole)


@given(st.data(), SEQUENCES)
def test_a_side_that_holds_less_is_joined_on_what_it_holds(
    data: st.DataObject, given: list[Tokens]
) -> None:
    cuts = [data.draw(st.integers(0, len(one))) for one in given]
    fewer = [one[:cut] for one, cut in zip(given, cuts, strict=True) if cut]
    if not fewer:
        return
    joined = join(opened(data.draw(layouts(given)), "a"), opened(data.draw(layouts(fewer)), "b"))
    assert len(joined) == len(prefixes(fewer))
    assert joined.left_out == len(prefixes(given)) - len(prefixes(fewer))


@given(st.data(), st.lists(st.integers(0, 9), min_size=2, max_size=8), st.integers(0, 7))
def test_different_tokens_are_an_error_that_names_them(
    data: st.DataObject, given: list[int], at: int
) -> None:
    at %= len(given)
    other = [*given[:at], 99, *data.draw(st.lists(st.integers(0, 9), max_size=4))]
    one = opened(data.draw(layouts([tuple(given)])), "rollout")
    two = opened(data.draw(layouts([tuple(other)])), "trainer")
    with pytest.raises(TokenMismatchError) as caught:
        join(one, two)
    said = str(caught.value)
    assert f"position {at}: rollout has {given[at]} (sequence 'q0')" in said
    assert "trainer has 99 (sequence 'q0')" in said and "\n" not in said


def lines(tokens: Sequence[int], name: str = "q", start: int = 0) -> list[Line]:
    return [
        Line(name, place, token, value_of(tuple(tokens[: place + 1])))
        for place, token in enumerate(tokens)
        if place >= start
    ]


def test_the_first_difference_is_named_though_others_follow(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a", [lines([1, 2, 3, 4], "x") + lines([5, 6], "y")])
    two = write_lines(tmp_path / "b", [lines([5, 7], "y") + lines([1, 2, 8, 4], "x")], label="b")
    with pytest.raises(TokenMismatchError, match=r"position 1: rollout has 6 .*, b has 7"):
        join(one, two)


def test_another_adapter_is_another_context(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a", [lines([1, 2, 3])], salts={"q": "adapter-1"})
    two = write_lines(tmp_path / "b", [lines([1, 2, 3])], label="b", salts={"q": "adapter-2"})
    with pytest.raises(LayerBisectError, match="no row in common: 3 and 3 rows.*same adapter"):
        join(one, two)
    same = write_lines(tmp_path / "c", [lines([1, 2, 3])], label="c", salts={"q": "adapter-1"})
    assert len(join(one, same)) == 3


def test_equal_tokens_under_two_adapters_are_no_repeats(tmp_path: Path) -> None:
    both = lines([1, 2], "x") + lines([1, 2], "y")
    one = write_lines(tmp_path / "a", [both], salts={"y": "adapter"})
    assert len(join(one, one)) == 4
    assert not len(repeats(one.keys)[0])


def test_rows_without_their_beginning_are_counted_and_left_out(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a", [lines([1, 2, 3], "x"), lines([4, 5, 6, 7], "y", start=2)])
    two = write_lines(tmp_path / "b", [lines([1, 2, 3], "x")], label="b")
    joined = join(one, two)
    assert (len(joined), joined.keyless, joined.left_out) == (3, 2, 2)


def test_rows_after_a_cached_prefix_are_joined_and_are_in_no_chain(tmp_path: Path) -> None:
    whole = lines([1, 2, 3, 4, 5, 6])
    one = write_lines(tmp_path / "a", [whole])
    two = write_lines(tmp_path / "b", [whole[3:]], label="b", cached=whole[:3])
    joined = join(one, two)
    assert (len(joined), joined.left_out, joined.chains.lengths) == (3, 3, ())
    half = write_lines(tmp_path / "c", [whole[:2], whole[3:]], label="c", cached=whole[:3])
    joined = join(one, half)
    assert (len(joined), joined.chains.lengths) == (5, (2,))


def test_repeats_are_found_within_one_capture(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a", [lines([1, 2, 3], "x"), lines([1, 2, 4], "y")])
    first, again = repeats(one.keys)
    assert first.tolist() == [0, 1] and again.tolist() == [3, 4]


def test_nothing_but_rows_joins_captures_without_scores(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a", [lines([1, 2, 3])], scored=False)
    two = write_lines(tmp_path / "b", [lines([1, 2, 3])], label="b", scored=False)
    joined = join(one, two)
    assert len(joined) == 3 and len(joined.score_rollout) == 0
