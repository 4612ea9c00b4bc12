"""Whether a capture with forced routes ran the same weights as the trainer with its own.

Fingerprints are of what a process holds whole, which under tensor parallelism is little. What comes
before the first router does not know of routes, so it is equal to the bit; what comes after is
equal up to rounding in tokens that go to the same experts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.join import Joined, join
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.points import all_points, parse
from layerbisect.captures.store import Capture
from layerbisect.kernels.judging.residuals import unit_roundoff

ROUNDINGS = 8.0
"""Sums in another order, as of other rows beside, change a row by less than so many roundoffs."""
ROWS = 3
"""So many rows beyond that are no accident."""

_SLOTS = ("mlp.expert_ids", "mlp.expert_weights", "mlp.expert_in", "mlp.expert_out")
_Pair = tuple[NDArray[Any], NDArray[Any]]


def refuse_other_weights(trainer: Capture, forced: Capture) -> bool:
    """Raise LayerBisectError, in a sentence, where forced routes do not explain a difference.

    Returns whether any point was compared at which a layer's weights show.
    """
    info = trainer.info
    joined = join(trainer, forced)
    first = min(info.moe_layers, default=info.num_layers)
    # tokens that have gone to the same experts so far, and all before them in their sequence
    alike = np.ones(len(joined), bool)
    compared = False
    for name in all_points(info.num_layers, info.moe_layers):
        point = parse(name)
        if point.layer is None and name != "embed":
            break
        if point.suffix == "mlp.expert_ids":
            alike &= _routed_alike(trainer, forced, joined, point.layer or 0)
        if point.suffix in _SLOTS or not alike.any():
            continue
        pair = _both(name, trainer, forced, joined, alike)
        if pair is None:
            continue
        before = point.layer is None or point.layer < first
        before |= point.layer == first and point.suffix not in ("mlp.out", "output")
        other = _differ(pair, 0.0 if before else _allowed(info.dtype, point.layer or 0))
        if other >= (1 if before else ROWS):
            raise LayerBisectError(
                f"{forced.directory} is of another state than {trainer.directory}: {name} differs "
                f"in {other} of {len(pair[0])} rows that went to the same experts so far; capture "
                "both with the same weights in the same layout and batches"
            )
        compared |= point.layer is not None
    return compared


def _allowed(dtype: str, layer: int) -> float:
    """Relative difference of a row up to which it is rounding, which grows as it is carried."""
    return ROUNDINGS * unit_roundoff(dtype) * math.sqrt(1 + layer)


def _differ(pair: _Pair, allowed: float) -> int:
    """Count rows whose relative difference is above ``allowed``."""
    ours, theirs = (one.reshape(len(one), -1).astype(np.float64) for one in pair)
    size = np.linalg.norm(ours, axis=1)
    return int((np.linalg.norm(ours - theirs, axis=1) > allowed * size).sum())


def _both(
    name: str, trainer: Capture, forced: Capture, joined: Joined, rows: NDArray[np.bool_]
) -> _Pair | None:
    """Values of the joined ``rows`` (bool [row]) that both hold, or None where there are none."""
    if name not in trainer.points or name not in forced.points:
        return None
    held = rows & trainer.has(name)[joined.rollout] & forced.has(name)[joined.trainer]
    if not held.any():
        return None
    return trainer.read(name, joined.rollout[held]), forced.read(name, joined.trainer[held])


def _routed_alike(
    trainer: Capture, forced: Capture, joined: Joined, layer: int
) -> NDArray[np.bool_]:
    """Say which joined rows, and all before them, a layer gives to the same experts: bool [row].

    Where weights were forced, too, these are the same up to rounding. None where it is not seen.
    """
    found = np.zeros(len(joined), bool)
    everything = np.ones(len(joined), bool)
    ids = _both(f"layers.{layer}.mlp.expert_ids", trainer, forced, joined, everything)
    if ids is None or len(ids[0]) < len(joined) or ids[0].shape != ids[1].shape:
        return found
    order = [one.argsort(1) for one in ids]
    sets = [np.take_along_axis(one, at, 1) for one, at in zip(ids, order, strict=True)]
    same = (sets[0] == sets[1]).all(1)
    if forced.info.routes == "forced with weights":
        given = _both(f"layers.{layer}.mlp.expert_weights", trainer, forced, joined, everything)
        if given is None or len(given[0]) < len(joined):
            return found
        ours, theirs = (np.take_along_axis(w, at, 1) for w, at in zip(given, order, strict=True))
        unit = unit_roundoff(trainer.info.dtype)
        same &= (np.abs(ours - theirs) <= ROUNDINGS / 2 * unit * np.abs(ours)).all(1)
    chains = joined.chains
    ends = np.cumsum(chains.lengths)
    for end, length in zip(ends, chains.lengths, strict=True):
        rows = chains.row[end - length : end]
        found[rows] = np.logical_and.accumulate(same[rows])
    return found
