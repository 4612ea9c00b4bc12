"""Measure disagreement so that no outlier row or massive channel can hide or fake it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.verdict import Gap, PointDifference

_WORST = 5


def score_gap(first: NDArray[np.float64], second: NDArray[np.float64]) -> Gap:
    """Summarize first - second over tokens (float64 [score] each, nat)."""
    difference = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    finite = np.isfinite(difference)
    kept = difference[finite]
    if not len(kept):
        nan = float("nan")
        return Gap(nan, nan, nan, nan, nan, 0, int((~finite).sum()))
    size = np.abs(kept)
    return Gap(
        mae=float(size.mean()),
        signed_mean=float(kept.mean()),
        p95=float(np.quantile(size, 0.95)),
        p99=float(np.quantile(size, 0.99)),
        max=float(size.max()),
        rows=len(kept),
        nonfinite=int((~finite).sum()),
    )


def row_errors(first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.float64]:
    """Relative difference of a point's values ([row, ...] each) by row, float64 [row].

    The error of a row is the root mean square of its channels' differences over that of its
    channels' values, each channel first divided by its own root mean square over rows. It is nan
    where a value of the row is not finite.
    """
    a = np.asarray(first, np.float64).reshape(len(first), -1)
    b = np.asarray(second, np.float64).reshape(len(second), -1)
    finite = np.isfinite(a).all(1) & np.isfinite(b).all(1)
    error = np.full(len(a), np.nan)
    if finite.any():
        kept_a, kept_b = a[finite], b[finite]
        channel = np.sqrt((kept_a**2 + kept_b**2).mean(0) / 2)
        scale = np.where(channel > 0, channel, 1.0)
        size = np.sqrt((((kept_a / scale) ** 2 + (kept_b / scale) ** 2) / 2).mean(1))
        apart = np.sqrt((((kept_a - kept_b) / scale) ** 2).mean(1))
        error[finite] = apart / np.where(size > 0, size, 1.0)
    return error


def point_difference(
    point: str,
    first: NDArray[np.floating],
    second: NDArray[np.floating],
    position: NDArray[np.int64],
    token: NDArray[np.int64],
    errors: NDArray[np.float64] | None = None,
) -> PointDifference:
    """Compare a point's values ([row, ...] each) row by row; ``errors`` are `row_errors` of them.

    What is not given is computed.
    """
    if errors is None:
        errors = row_errors(first, second)
    rows = len(errors)
    finite = ~np.isnan(errors)
    equal = float((first == second).reshape(rows, -1).all(1).mean()) if rows else 0.0
    nonfinite = int((~finite).sum())
    if not finite.any():
        nan = float("nan")
        return PointDifference(point, rows, equal, nonfinite, nan, nan, nan, nan)
    error = errors[finite]
    places = np.flatnonzero(finite)
    worst = np.argsort(-error, kind="stable")[:_WORST]
    return PointDifference(
        point=point,
        rows=rows,
        bitwise_equal=equal,
        nonfinite=nonfinite,
        median=float(np.median(error)),
        p95=float(np.quantile(error, 0.95)),
        p99=float(np.quantile(error, 0.99)),
        max=float(error.max()),
        worst_rows=tuple(
            (int(position[places[w]]), int(token[places[w]]), float(error[w])) for w in worst
        ),
    )
