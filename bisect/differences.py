"""Compare every point that both sides show, one at a time."""

from __future__ import annotations

import numpy as np

from layerbisect.bisect.join import Joined
from layerbisect.bisect.metrics import point_difference
from layerbisect.bisect.progress import Progress
from layerbisect.bisect.side import Side
from layerbisect.bisect.verdict import PointDifference
from layerbisect.captures.points import all_points


def point_differences(
    sides: tuple[Side, Side], joined: Joined, progress: Progress
) -> tuple[PointDifference, ...]:
    """Compare both sides' values of each common point over the joined rows that both have.

    Reads one point of each side at a time. Expert IDs are compared elsewhere: their difference has
    no size.
    """
    first, second = (side.capture for side in sides)
    common = [
        name
        for name in all_points(first.info.num_layers, first.info.moe_layers)
        if name in first.points and name in second.points and not name.endswith("expert_ids")
    ]
    rows = first.rows.take(joined.rollout)
    found = []
    progress.start("comparing points", len(common))
    for done, name in enumerate(common, 1):
        both = first.has(name)[joined.rollout] & second.has(name)[joined.trainer]
        if both.any():
            found.append(
                point_difference(
                    name,
                    first.read(name, joined.rollout[both]),
                    second.read(name, joined.trainer[both]),
                    rows.position[both].astype(np.int64),
                    rows.token[both],
                )
            )
        progress.advance(done)
    return tuple(found)
