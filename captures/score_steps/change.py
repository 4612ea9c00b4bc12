"""Say in words what was done to scores, from their values before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal[
    "same", "shape", "offset", "scale", "constant", "lag", "order", "rounding", "exp", "other"
]

_LAGS = (1, -1, 2, -2, 3, -3)
FLOAT32_EPS = float(np.finfo(np.float32).eps)
# a fit to fewer values shows nothing: any one value is a factor of any other
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class ValueChange:
    """What differs between two arrays of scores.

    ``amount`` is the offset (nat), factor, constant or lag that ``kind`` speaks of, nan for others;
    ``changed`` counts the values that differ, out of ``values``; ``mean_abs`` and ``max_abs`` (nat)
    are over all of them, nan where shapes differ.
    """

    kind: Kind
    amount: float
    changed: int
    values: int
    mean_abs: float
    max_abs: float
    summary: str


def describe_change(
    before: NDArray[np.float64], after: NDArray[np.float64], *, eps: float = FLOAT32_EPS
) -> ValueChange:
    """Compare scores ``after`` with those ``before``, both [..., position] (nat).

    ``eps`` is the relative rounding of the dtype that they were computed in: a fitted offset or
    factor must leave no more than that.
    """
    nan = float("nan")
    if before.shape != after.shape:
        return ValueChange("shape", nan, 0, after.size, nan, nan, _reshaped(before, after))
    differs = ~((before == after) | (np.isnan(before) & np.isnan(after)))
    changed = int(differs.sum())
    if not changed:
        return ValueChange("same", 0.0, 0, after.size, 0.0, 0.0, "nothing changed")
    size = np.abs(np.subtract(after, before, where=differs, out=np.zeros(after.shape)))
    kind, amount, what = _fit(before, after, differs, eps)
    summary = f"{_which(differs)} {what}"
    mean, worst = float(size.mean()), float(size.max())
    return ValueChange(kind, amount, changed, after.size, mean, worst, summary)


def _fit(
    before: NDArray[np.float64], after: NDArray[np.float64], differs: NDArray[np.bool_], eps: float
) -> tuple[Kind, float, str]:
    """The simplest thing that explains the values that differ."""
    nan = float("nan")
    x, y = before[differs], after[differs]
    if not np.isfinite(y).all():
        bad = int((~np.isfinite(y)).sum())
        return "other", nan, f"changed, {bad} of them to what is no number"
    if not np.isfinite(x).all():
        return "other", nan, "changed, some of them from what is no number"
    # bfloat16 keeps 8 bits of the significand, float16 keeps 11
    for name, bits in (("bfloat16", 8), ("float16", 11)):
        _, exponent = np.frexp(x)
        unit = np.ldexp(1.0, exponent - bits)
        if (np.abs(y - x) < unit).all() and (y / unit == np.round(y / unit)).all():
            return "rounding", nan, f"rounded to {name}"
    room = 4 * eps * np.maximum(np.abs(x), np.abs(y))
    # the smallest value was rounded least
    offset = float((y - x)[room.argmin()])
    if (np.abs(y - x - offset) <= room + room.min()).all():
        way = "raised" if offset > 0 else "lowered"
        return "offset", offset, f"{way} by {abs(offset):.6f}"
    if (y == y[0]).all():
        return "constant", float(y[0]), f"set to {y[0] + 0.0:g}"
    if len(x) >= _FEWEST:
        factor = float(y @ x / (x @ x)) if x.any() else nan
        if (np.abs(y - factor * x) <= room).all():
            return "scale", factor, f"multiplied by {factor:.6f}"
        for lag in _LAGS:
            if _moved(before, after, lag):
                way = "later" if lag > 0 else "earlier"
                return "lag", float(lag), f"moved {abs(lag)} position{'s'[: abs(lag) > 1]} {way}"
        if np.array_equal(np.sort(x), np.sort(y)):
            return "order", nan, "reordered"
    if (np.abs(y - np.exp(x)) <= 4 * eps * (1 + np.abs(x)) * np.abs(y)).all():
        return "exp", nan, "turned into probabilities"
    return "other", nan, "changed, by no single offset, factor or lag"


def _which(differs: NDArray[np.bool_]) -> str:
    """Name the values that differ."""
    if differs.all():
        return "every value"
    count = f"{int(differs.sum())} of {differs.size} values"
    columns = differs.reshape(-1, differs.shape[-1])
    places = np.flatnonzero(columns.any(0))
    first, last = int(places[0]), int(places[-1])
    if first and columns[:, first:].all():
        return f"{count}, from position {first} on,"
    if last + 1 < columns.shape[1] and columns[:, : last + 1].all():
        return f"{count}, up to position {last},"
    return count


def _moved(before: NDArray[np.float64], after: NDArray[np.float64], lag: int) -> bool:
    if before.shape[-1] < abs(lag) + _FEWEST:
        return False
    old, new = (before, after) if lag > 0 else (after, before)
    return np.array_equal(old[..., : -abs(lag)], new[..., abs(lag) :])


def _reshaped(before: NDArray[np.float64], after: NDArray[np.float64]) -> str:
    shapes = f"{list(before.shape)} became {list(after.shape)}"
    if before.size == after.size and np.array_equal(before.ravel(), after.ravel()):
        return f"{shapes} with the same values"
    if before.shape[:-1] == after.shape[:-1] and 0 < after.shape[-1] < before.shape[-1]:
        count = after.shape[-1]
        for start in range(before.shape[-1] - count + 1):
            if np.array_equal(before[..., start : start + count], after):
                return f"{shapes}: positions {start} to {start + count - 1} are kept"
    return shapes
