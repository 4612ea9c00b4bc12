"""Compare every point that both sides show, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from layerbisect.bisect.join import Joined
from layerbisect.bisect.metrics import point_difference, row_errors
from layerbisect.bisect.progress import Progress
from layerbisect.bisect.routing_flips import by_expert
from layerbisect.bisect.selection import expert_sets
from layerbisect.bisect.side import Side
from layerbisect.bisect.verdict import PointDifference
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.points import all_points, boundary, parse


@dataclass(frozen=True, slots=True)
class Comparison:
    """How all points differ, and how the residual stream does in each row.

    ``streams`` has, for each layer boundary that both sides show, the joined rows' relative
    differences (float32 [row]; nan where a side lacks the row, or a value of it is not finite).
    """

    points: tuple[PointDifference, ...]
    streams: Mapping[int, NDArray[np.float32]]


def point_differences(
    sides: tuple[Side, Side], joined: Joined, experts: int, progress: Progress
) -> Comparison:
    """Compare both sides' values of each common point over the joined rows that both have.

    Experts' numbers are compared as sets of the model's ``experts``, their weights expert by expert
    and what goes in and out of them by number, for each engine has an order of slots of its own. A
    point whose rows have another shape on the other side is wholly different. Raises
    LayerBisectError where that is the hidden size.
    """
    first, second = sides
    info = first.capture.info
    common = [
        name
        for name in all_points(info.num_layers, info.moe_layers)
        if name in first.capture.points and name in second.capture.points
    ]
    rows = first.capture.rows.take(joined.rollout)
    boundaries = {boundary(n, info.num_layers): n for n in range(info.num_layers + 1)}
    found = []
    streams = {}
    progress.start("comparing points", len(common))
    for done, name in enumerate(common, 1):
        both = first.holds(name, joined.rollout) & second.holds(name, joined.trainer)
        if both.any():
            ours = _values(first, name, joined.rollout[both], experts)
            theirs = _values(second, name, joined.trainer[both], experts)
            if ours.shape != theirs.shape:
                found.append(_other_shape(name, ours.shape, theirs.shape, sides))
                continue
            position, token = rows.position[both].astype(np.int64), rows.token[both]
            errors = row_errors(ours, theirs)
            found.append(point_difference(name, ours, theirs, position, token, errors))
            if name in boundaries:
                stream = np.full(len(joined), np.nan, np.float32)
                stream[both] = errors
                streams[boundaries[name]] = stream
        progress.advance(done)
    return Comparison(tuple(found), dict(sorted(streams.items())))


def _values(side: Side, name: str, rows: NDArray[np.intp], experts: int) -> NDArray[Any]:
    """Read a point ([row, ...]); slots are laid out, or ordered, by expert."""
    values = side.values(name, rows)
    if name.endswith("expert_ids"):
        return expert_sets(torch.from_numpy(values).long(), experts).float().numpy()
    stem, _, what = name.rpartition(".expert_")
    if what not in ("weights", "in", "out"):
        return values
    numbers = f"{stem}.expert_ids"
    if side.holds(numbers, rows).all():
        ids = torch.from_numpy(side.values(numbers, rows)).long()
        if what != "weights":
            return np.take_along_axis(values, ids.argsort(1).numpy()[:, :, None], 1)
        if ids.shape == values.shape:
            return by_expert(ids, torch.from_numpy(values), experts).numpy()
    # of which expert each of them is, is not known
    return np.sort(values, axis=1) if what == "weights" else values


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
