"""One outlier row or one massive channel can neither hide a difference nor fake one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from layerbisect.bisect.metrics import point_difference, score_gap
from layerbisect.bisect.verdict import PointDifference

ROWS, CHANNELS = 100, 32


def pair(by: float, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Two sides whose values differ by a share of their size."""
    draw = np.random.default_rng(seed)
    first = draw.standard_normal((ROWS, CHANNELS)).astype(np.float32)
    second = first * (1 + by * draw.standard_normal((ROWS, CHANNELS))).astype(np.float32)
    return first, second.astype(np.float32)


def difference(first: NDArray[np.float32], second: NDArray[np.float32]) -> PointDifference:
    rows = np.arange(len(first))
    return point_difference("layers.0.input", first, second, rows, rows + 1000)


def test_a_relative_error_is_what_it_says() -> None:
    found = difference(*pair(0.01))
    assert found.median == pytest.approx(0.01, rel=0.2)
    assert found.median < found.p95 < found.p99 <= found.max < 0.03
    assert (found.rows, found.nonfinite, found.bitwise_equal) == (ROWS, 0, 0.0)


def test_equal_values_are_equal_to_the_bit() -> None:
    first, _ = pair(0)
    second = first.copy()
    second[:25, 3] += 1
    assert difference(first, first).bitwise_equal == 1.0
    assert difference(first, first).max == 0.0
    assert difference(first, second).bitwise_equal == 0.75
    assert difference(np.zeros((4, 8), np.float32), np.zeros((4, 8), np.float32)).max == 0.0


def test_one_massive_channel_neither_hides_nor_fakes() -> None:
    first, second = pair(0.05)
    plain = difference(first, second).median
    # equal on both sides, it would swamp the error of all others in a plain norm
    first[:, 7] = second[:, 7] = 1e6
    assert difference(first, second).median == pytest.approx(plain, rel=0.1)
    # and where it is all that differs, it is one channel of many
    same = first.copy()
    same[:, 7] *= 1.01
    assert difference(first, same).median == pytest.approx(0.01 / CHANNELS**0.5, rel=0.1)


def test_one_outlier_row_neither_hides_nor_fakes() -> None:
    first, second = pair(0.01)
    plain = difference(first, second)
    second[42] = 1e4
    found = difference(first, second)
    assert found.median == pytest.approx(plain.median, rel=0.5)
    assert found.max > 1 and found.worst_rows[0][:2] == (42, 1042)
    massive = first * np.where(np.arange(ROWS) == 9, 1e5, 1).astype(np.float32)[:, None]
    assert difference(massive, massive * np.float32(1.01)).median == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_counted_apart(value: float) -> None:
    first, second = pair(0.01)
    plain = difference(first[2:], second[2:])
    first[0, 0], second[1, 5] = value, value
    found = difference(first, second)
    assert found.nonfinite == 2 and found.rows == ROWS
    assert (found.median, found.max) == (plain.median, plain.max)
    place, token, error = plain.worst_rows[0]
    assert found.worst_rows[0] == (place + 2, token + 2, error)


def test_nothing_finite_has_no_size() -> None:
    first, second = pair(0.01)
    found = difference(first * np.float32(np.nan), second)
    assert found.nonfinite == ROWS and math.isnan(found.max) and found.worst_rows == ()


def test_heads_and_channels_are_one_row() -> None:
    first, second = pair(0.01)
    flat = difference(first, second)
    heads = difference(first.reshape(ROWS, 4, 8), second.reshape(ROWS, 4, 8))
    assert heads == flat


FINITE = st.floats(-50, 0, allow_nan=False)


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=30), st.integers(0, 3))
def test_a_gap_is_of_finite_pairs_alone(pairs: list[tuple[float, float]], broken: int) -> None:
    spoiled = [*pairs, *[(math.nan, -1.0), (-1.0, -math.inf), (math.nan, math.nan)][:broken]]
    first, second = np.array(spoiled).T
    gap = score_gap(first, second)
    sizes = [abs(a - b) for a, b in pairs]
    assert (gap.rows, gap.nonfinite, gap.unit) == (len(pairs), broken, "nat")
    assert gap.mae == pytest.approx(sum(sizes) / len(sizes))
    assert gap.signed_mean == pytest.approx(sum(a - b for a, b in pairs) / len(pairs), abs=1e-9)
    assert gap.p95 <= gap.p99 <= gap.max == max(sizes)
    assert abs(gap.signed_mean) <= gap.mae + 1e-12


def test_no_pairs_make_no_gap() -> None:
    gap = score_gap(np.empty(0), np.empty(0))
    assert gap.rows == 0 and math.isnan(gap.mae)
