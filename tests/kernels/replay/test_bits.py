"""Distances between numbers: by hand, by numpy's own spacing, and of what is not a number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.kernels.replay.bits import (
    changed_rows,
    most_ulps,
    same_bits,
    spacing,
    ulp_histogram,
    ulps_apart,
)


@given(st.floats(width=16, allow_nan=False, allow_infinity=False))
def test_spacing_is_numpys(value: float) -> None:
    own = float(spacing(torch.tensor([value], dtype=torch.float16), torch.float16))
    assert own == abs(float(np.spacing(np.float16(abs(value)))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_neighbour_is_one_ulp_away(dtype: torch.dtype) -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)).to(dtype)
    # away from zero, so that a power of two counts by the spacing above it
    above = torch.nextafter(values, values.sign() * torch.inf)
    assert torch.equal(ulps_apart(above, values, dtype), torch.ones(500, dtype=torch.float64))


def test_same_bits_are_stricter_than_equal() -> None:
    first = torch.tensor([0.0, torch.nan, 1.0, 2.0], dtype=torch.bfloat16)
    second = torch.tensor([-0.0, torch.nan, 1.0, 3.0], dtype=torch.bfloat16)
    assert same_bits(first, second).tolist() == [False, True, True, False]
    assert same_bits(torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [True, False]


def test_a_histogram_of_distances() -> None:
    ulp = 2.0**-7
    exact = torch.ones(8, dtype=torch.float64)
    apart = torch.tensor([0, 0, 1, 2, 3, 16, 17, 500])
    shares = ulp_histogram(1 + apart * ulp, exact, torch.bfloat16)
    assert shares == {
        "0": 0.25, "<=1": 0.125, "<=2": 0.125, "<=4": 0.125, "<=16": 0.125, ">16": 0.25,
    }  # fmt: skip
    # a wider result that rounds to the right number is right
    assert ulp_histogram(exact + ulp / 4, exact, torch.bfloat16)["0"] == 1
    unknown = torch.tensor([torch.nan, torch.inf])
    assert not any(ulp_histogram(unknown, torch.ones(2), torch.bfloat16).values())


def test_what_cancelled_is_measured_by_its_row() -> None:
    row = torch.tensor([[100.0, 1e-6, 0.0]])
    moved = torch.tensor([[100.0, 2e-6, 0.0]])
    assert float(ulps_apart(moved, row, torch.float32).max()) > 1e6
    assert most_ulps(moved, row, torch.float32) < 1
    assert most_ulps(row, row * torch.nan, torch.float32) == 0


def test_changed_rows() -> None:
    base = {"y": torch.ones(4, 2, 3), "ids": torch.zeros(4, 2, dtype=torch.int64)}
    other = {name: values.clone() for name, values in base.items()}
    other["y"][1, 1, 2] += 2**-22
    other["ids"][3, 0] = 5
    other["y"][0] *= torch.nan
    rows, most = changed_rows(other, base, torch.float32)
    assert rows.tolist() == [True, True, False, True]
    assert most == 2
