"""How much a fault in a real engine changes, and where first, by captures of the same tokens."""

from __future__ import annotations

import math

import numpy as np

from layerbisect.bisect.join import join
from layerbisect.captures.points import all_points
from layerbisect.captures.store import Capture
from scripts.planted.engine_runs import Scores

SPACING = 2.0**-7
"""Of bfloat16 at 1."""


def apart(one: Scores, other: Scores) -> float:
    """Mean absolute difference, nat."""
    return float(np.abs(np.array(one) - np.array(other)).mean())


def changed(right: Capture, taken: Capture, point: str, *, decode: bool = False) -> float:
    """Root mean square of what differs at a point, in roundings to bfloat16 of its values there.

    ``decode`` looks at the rows alone that ``taken`` decoded. nan where the point was not captured.
    """
    if not all(point in one.points and one.has(point).all() for one in (right, taken)):
        return math.nan
    joined = join(right, taken)
    rows, others = joined.rollout, joined.trainer
    if decode:
        decoded = taken.phases[others] == "decode"
        rows, others = rows[decoded], others[decoded]
    values = right.read(point, rows).astype(np.float64)
    off = taken.read(point, others) - values
    # a rounding error is spread evenly over half a spacing to either side
    rounding = np.sqrt(np.square(values).mean() / 12) * SPACING
    return float(np.sqrt(np.square(off).mean()) / rounding)


def first_changed(right: Capture, taken: Capture) -> str | None:
    """The first point, in the order of computation, of which any bit differs; None where none does.

    Points that either side did not capture are passed over.
    """
    joined = join(right, taken)
    for point in all_points(right.info.num_layers, right.info.moe_layers):
        if all(point in one.points and one.has(point).all() for one in (right, taken)):
            first, second = right.read(point, joined.rollout), taken.read(point, joined.trainer)
            if not np.array_equal(first, second):
                return point
    return None
