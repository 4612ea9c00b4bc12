"""Compare every point that both sides show, one at a time."""

from __future__ import annotations

import numpy as np

from layerbisect.bisect.join import Joined
from layerbisect.bisect.metrics import point_difference
from layerbisect.bisect.progress import Progress
from layerbisect.bisect.side import Side
from layerbisect.bisect.verdict import PointDifference
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.points import all_points, parse


def point_differences(
    sides: tuple[Side, Side], joined: Joined, progress: Progress
) -> tuple[PointDifference, ...]:
    """Compare both sides' values of each common point over the joined rows that both have.

    Expert IDs are left out, for their difference has no size; expert weights are compared by size,
    for each engine has an order of slots of its own. A point whose rows have another shape on the
    other side is wholly different. Raises LayerBisectError where that is the hidden size.
    """
    first, second = sides
    info = first.capture.info
    common = [
        name
        for name in all_points(info.num_layers, info.moe_layers)
        if name in first.capture.points
        and name in second.capture.points
        and not name.endswith("expert_ids")
    ]
    rows = first.capture.rows.take(joined.rollout)
    found = []
    progress.start("comparing points", len(common))
    for done, name in enumerate(common, 1):
        both = first.holds(name, joined.rollout) & second.holds(name, joined.trainer)
        if both.any():
            ours = first.values(name, joined.rollout[both])
            theirs = second.values(name, joined.trainer[both])
            if ours.shape != theirs.shape:
                found.append(_other_shape(name, ours.shape, theirs.shape, sides))
                continue
            if name.endswith("expert_weights"):
                ours, theirs = np.sort(ours, axis=1), np.sort(theirs, axis=1)
            position, token = rows.position[both].astype(np.int64), rows.token[both]
            found.append(point_difference(name, ours, theirs, position, token))
        progress.advance(done)
    return tuple(found)


def _other_shape(
    name: str, ours: tuple[int, ...], theirs: tuple[int, ...], sides: tuple[Side, Side]
) -> PointDifference:
    if "hidden" in parse(name).dims:
        first, second = (side.label for side in sides)
        raise LayerBisectError(
            f"{name} has {ours[1]} channels in {first} and {theirs[1]} in {second}: the captures "
            "are of different models, or one is damaged"
        )
    nan = float("nan")
    return PointDifference(name, ours[0], 0.0, 0, nan, nan, nan, nan)
