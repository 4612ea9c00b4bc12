"""However many rows a heatmap is of, its worst cells survive."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from layerbisect.bisect.heatmap import COLUMNS, HeatRows, reduce_rows
from layerbisect.bisect.token_report import Heatmap

Values = dict[int, NDArray[np.float32]]


def rows_of(lengths: list[int], starts: list[int] | None = None) -> HeatRows:
    begin = starts or [0] * len(lengths)
    return HeatRows(
        tuple(f"s{i}" for i in range(len(lengths))),
        np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate([np.arange(b, b + n) for b, n in zip(begin, lengths, strict=True)]),
    )


def close(shown: float | None, value: float) -> bool:
    return (np.isnan(value) and shown is None) or shown == pytest.approx(value, rel=5e-4)


def check_reduced(found: Heatmap, values: Values, rows: HeatRows) -> None:
    """Hold a heatmap against its rows: columns tile them, and have the largest of theirs."""
    where = {
        (rows.names[s], int(p)): row
        for row, (s, p) in enumerate(zip(rows.sequence, rows.position, strict=True))
    }
    assert found.boundaries == tuple(sorted(values)) and len(found.columns) <= COLUMNS
    told = [[where[c.sequence, p] for p in range(c.start, c.stop)] for c in found.columns]
    shown = [row for column in told for row in column]
    assert shown == sorted(set(shown)) and len(shown) + found.left_out == len(rows)
    assert bool(found.worst) == (len(found.columns) < len(shown))
    for place, boundary in enumerate(found.boundaries):
        value = np.where(np.isfinite(values[boundary]), values[boundary], np.nan)
        for number, column in enumerate(told):
            cell = found.values[place][number]
            assert close(cell, float(np.fmax.reduce(value[column])))
            if found.worst:
                at = where[found.columns[number].sequence, found.worst[place][number]]
                assert at in column and (cell is None or value[at] == np.nanmax(value[column]))
        cells = [cell for cell in found.values[place] if cell is not None]
        largest = float(np.fmax.reduce(value))
        assert close(max(cells, default=None), largest)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Values, HeatRows]:
    many = draw(st.booleans())
    sizes = (
        st.lists(st.integers(1, 3), min_size=500, max_size=620)
        if many
        else st.lists(st.integers(1, 700), min_size=1, max_size=8)
    )
    rows = rows_of(lengths := draw(sizes), [draw(st.integers(0, 9))] * len(lengths))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values: Values = {}
    for boundary in draw(st.sets(st.integers(0, 99), min_size=1, max_size=5)):
        value = random.exponential(10.0 ** random.integers(-6, 3), len(rows)).astype(np.float32)
        if draw(st.booleans()):
            value = np.round(value)
        value[random.random(len(rows)) < draw(st.sampled_from([0.0, 0.3, 0.99]))] = np.nan
        value[random.random(len(rows)) < draw(st.sampled_from([0.0, 0.01]))] = np.inf
        values[boundary] = value
    return values, rows


@given(cases())
def test_a_column_is_the_largest_of_its_rows_and_says_which(case: tuple[Values, HeatRows]) -> None:
    values, rows = case
    found = reduce_rows("stream", "relative", values, rows)
    if found is None:
        assert not any(np.isfinite(value).any() for value in values.values())
    else:
        check_reduced(found, values, rows)


def test_of_more_sequences_than_columns_the_worst_are_shown() -> None:
    lengths = [2] * 600
    rows = rows_of(lengths)
    value = np.arange(1200, dtype=np.float32)
    early = np.zeros(1200, np.float32)
    early[3] = 1e-6
    found = reduce_rows("stream", "relative", {0: early, 9: value}, rows)
    assert found is not None and found.left_out == 176 and len(found.columns) == COLUMNS
    # the largest of each boundary, whatever its size, and those that are large anywhere
    assert [c.sequence for c in found.columns] == ["s1", *(f"s{i}" for i in range(89, 600))]
    assert found.values[0][0] == 1e-6 and found.worst[0][0] == 1


def test_a_large_case_is_reduced_at_once_and_stays_small() -> None:
    random = np.random.default_rng(0)
    rows = rows_of([4096] * 8)
    values: Values = {n: random.random(len(rows), np.float32) for n in range(95)}
    start = time.process_time()
    found = reduce_rows("carried gap", "nat", values, rows)
    seconds = time.process_time() - start
    assert found is not None and seconds < 2, seconds
    assert len(found.columns) == COLUMNS and len(found.boundaries) == 95
    assert len(json.dumps(asdict(found))) < 3e6
