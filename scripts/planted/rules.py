"""The simpler rules that the verdict is held against: the first layer beyond a fixed threshold.

What engineers do without a reference: compare both sides' residual stream layer by layer, and
blame the first layer after which a measure is beyond a threshold. Neither rule can name a side or
an operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layerbisect.bisect.join import join
from layerbisect.captures.points import boundary
from layerbisect.captures.store import Capture

RELATIVE, COSINE = "relative error", "cosine"
RULES = (RELATIVE, COSINE)


def profile(rollout: Capture, trainer: Capture) -> dict[str, list[float]]:
    """Measure how far apart the sides are after the embedding and each layer, by both rules.

    Of each boundary: the norm of the whole tensor's difference over the norm of the tensor, and
    one minus the cosine of both as one long vector. float, no unit; nan where a side lacks it.
    """
    sides = (rollout, trainer)
    joined = join(*sides)
    layers = sides[0].info.num_layers
    found: dict[str, list[float]] = {rule: [] for rule in RULES}
    for number in range(layers + 1):
        name = boundary(number, layers)
        if not all(side.has(name).all() for side in sides):
            for rule in RULES:
                found[rule].append(float("nan"))
            continue
        first = sides[0].read(name, joined.rollout).astype(np.float64).ravel()
        second = sides[1].read(name, joined.trainer).astype(np.float64).ravel()
        size = np.linalg.norm(first) * np.linalg.norm(second)
        found[RELATIVE].append(float(np.linalg.norm(first - second) / np.linalg.norm(second)))
        found[COSINE].append(max(float(1 - first @ second / size), 0.0))
    return found


def first_beyond(measured: Sequence[float], threshold: float) -> int | None:
    """The layer after which a measure is first beyond a threshold; None where it never is.

    ``measured`` is of the embedding and then of each layer. What is beyond it at the embedding is
    blamed on the embedding, -1. Not finite counts as beyond.
    """
    for number, value in enumerate(measured):
        if not value <= threshold:
            return number - 1
    return None
