"""Compare what backwards computed again with what the forwards had computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.training_causes import explain
from layerbisect.bisect.training_points import Pair, compared
from layerbisect.bisect.training_report import Recomputed
from layerbisect.bisect.training_routing import doing_of, route_origins
from layerbisect.captures.forward_mode import ForwardMode
from layerbisect.captures.gather import JointPass
from layerbisect.captures.points import parse
from layerbisect.captures.store import Capture

_KEPT = ("input", "attn.q", "attn.k", "attn.v")
"""What a layer, or its attention, is given: it may have been kept, and not computed again."""


def recomputed(training: Capture, mode: ForwardMode | None) -> Recomputed:
    """Compare the passes that ``training`` computed again, each with the one that it repeats."""
    setting = mode.recompute if mode is not None else ""
    if not training.recomputed:
        return Recomputed(setting)
    again = Capture.open(training.directory, recomputed=True)
    # by pass and not by prefix: of equal prefixes each has a dropout of its own
    forwards = {key: one for one in training.passes for key in _names(one)}
    first: list[NDArray[np.intp]] = []
    second: list[NDArray[np.intp]] = []
    for one in again.passes:
        of = next((forwards[key] for key in _names(one) if key in forwards), None)
        if of is not None and len(of.rows) == len(one.rows):
            first.append(np.arange(of.start, of.start + len(of.rows)))
            second.append(np.arange(one.start, one.start + len(one.rows)))
    if not first:
        return Recomputed(setting)
    pair = Pair(training, again, np.concatenate(first), np.concatenate(second))
    points = tuple(compared(pair))
    return Recomputed(
        setting=setting,
        rows=len(pair.first_rows),
        points=len(points),
        inner=sum(parse(point.point).suffix not in _KEPT for point in points),
        differing=tuple(point for point in points if point.differing),
        causes=explain(points, pair.order, doing_of(pair, route_origins(pair), mode), again=True),
    )


def _names(one: JointPass) -> list[tuple[str, int]]:
    """The ranks that wrote a pass, each with the pass's number, which replicas count alike."""
    return [(file.path.parent.name, file.header.index) for file in one.ranks]
