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


def point_difference(
    point: str,
    first: NDArray[np.floating],
    second: NDArray[np.floating],
    position: NDArray[np.int64],
    token: NDArray[np.int64],
) -> PointDifference:
    """Compare a point's values ([row, ...] each) row by row.

    The error of a row is the root mean square of its channels' differences over that of its
    channels' values, each channel first divided by its own root mean square over rows.
    """
    a = np.asarray(first, np.float64).reshape(len(first), -1)
    b = np.asarray(second, np.float64).reshape(len(second), -1)
    finite = np.isfinite(a).all(1) & np.isfinite(b).all(1)
    equal = float((first == second).reshape(len(a), -1).all(1).mean()) if len(a) else 0.0
    nonfinite = int((~finite).sum())
    if not finite.any():
        nan = float("nan")
        return PointDifference(point, len(a), equal, nonfinite, nan, nan, nan, nan)
    kept_a, kept_b = a[finite], b[finite]
    channel = np.sqrt((kept_a**2 + kept_b**2).mean(0) / 2)
    used = channel > 0
    scale = np.where(used, channel, 1.0)
    size = np.sqrt((((kept_a / scale) ** 2 + (kept_b / scale) ** 2) / 2).mean(1))
    error = np.sqrt((((kept_a - kept_b) / scale) ** 2).mean(1)) / np.where(size > 0, size, 1.0)
    places = np.flatnonzero(finite)
    worst = np.argsort(-error, kind="stable")[:_WORST]
    return PointDifference(
        point=point,
        rows=len(a),
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
