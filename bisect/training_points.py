"""Compare one module's values in two forwards, point by point, bit for bit and in size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.metrics import point_difference
from layerbisect.bisect.training_report import Apart
from layerbisect.captures.chains import Chains
from layerbisect.captures.points import all_points, parse
from layerbisect.captures.store import Capture
from layerbisect.kernels.judging.residuals import unit_roundoff

ROUNDINGS = 1.0
"""Unit roundoffs that two results of one rounding may differ by over a row, in root mean square:
about twice what two independent roundings make, as the 99th percentile of rows is looked at."""
_STEPS = {
    "attn.norm": 2,
    # projected, normed and rotated
    "attn.q": 3,
    "attn.k": 3,
    # rounded scores and probabilities, of which some kernels round neither
    "attn.context": 8,
    "mlp.norm": 2,
    "mlp.expert_out": 4,
    "mlp.out": 4,
}
"""How many roundings lie inside of an operator; one in those that are not named."""

_STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# a sum of n float32 products in two orders, in units of sqrt(n) roundoffs
_ORDER = 4.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two forwards of one module, and which of their rows are of the same prefix (int [row]).

    ``chains`` say which rows are before which, where that is needed.
    """

    first: Capture
    second: Capture
    first_rows: NDArray[np.intp]
    second_rows: NDArray[np.intp]
    chains: Chains | None = None

    @property
    def order(self) -> tuple[str, ...]:
        """All points of the model, in the order of computation."""
        info = self.first.info
        return all_points(info.num_layers, info.moe_layers)

    def held(self, point: str) -> NDArray[np.bool_]:
        """Which rows (bool [row]) both hold a point in."""
        return self.first.has(point)[self.first_rows] & self.second.has(point)[self.second_rows]

    def read(
        self, point: str, rows: NDArray[np.bool_]
    ) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        """Both sides' values [row, ...] of a point; slots lie by the number of their expert."""
        first = _laid_out(self.first, point, self.first_rows[rows])
        return first, _laid_out(self.second, point, self.second_rows[rows])


def compared(pair: Pair) -> Iterator[Apart]:
    """Compare each point that both hold, in the order of computation."""
    before = -1
    rerouted = np.zeros(len(pair.first_rows), bool)
    for at, point in enumerate(pair.order):
        rows = pair.held(point)
        if not rows.any():
            continue
        first, second = pair.read(point, rows)
        steps = roundings(pair.order[before + 1 : at + 1])
        allowed = allowed_size(pair.first, point, math.prod(first.shape[1:]), steps)
        yield _apart(point, first, second, rerouted[rows], allowed)
        before = at
        if point.endswith("expert_ids"):
            rerouted[rows] |= ~same_bits(first, second)
            if pair.chains is not None:
                rerouted[pair.chains.row] = _so_far(rerouted[pair.chains.row], pair.chains)


def between(order: Sequence[str], after: str | None, point: str) -> tuple[str, ...]:
    """Points after one and up to another: what of the computation lies there."""
    start = 0 if after is None else order.index(after) + 1
    return tuple(order[start : order.index(point) + 1])


def same_bits(first: NDArray[np.generic], second: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Whether rows are equal bit for bit: bool [row]; a shape or dtype of its own is not."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return np.zeros(len(first), bool)
    bits = [np.ascontiguousarray(one).view(f"u{one.dtype.itemsize}") for one in (first, second)]
    equal: NDArray[np.bool_] = (bits[0] == bits[1]).reshape(len(first), -1).all(1)
    return equal


def relative_size(
    point: str, first: NDArray[np.generic], second: NDArray[np.generic]
) -> tuple[float, int]:
    """99th percentile over rows of the relative difference, and how many rows are not finite."""
    if first.shape != second.shape:
        return math.inf, 0
    nothing = np.zeros(len(first), np.int64)
    found = point_difference(
        point, first.astype(np.float64), second.astype(np.float64), nothing, nothing
    )
    size = found.p99
    return (math.inf if found.nonfinite or math.isnan(size) else size), found.nonfinite


def roundings(points: Sequence[str]) -> int:
    """How many roundings lie in the operators that end in these points."""
    return sum(_STEPS.get(parse(point).suffix, 1) for point in points)


def allowed_size(capture: Capture, point: str, width: int, steps: int) -> float:
    """How large a relative difference is that rounding alone makes.

    So many ``steps`` of rounding in the captured dtype are independent, and add in squares;
    ``width`` is a row's width, which with the hidden size stands for the length of the sums.
    """
    stored = next(f.dtype(point) for p in capture.passes for f in p.ranks if point in f.tensors)
    model = capture.info.dtype if capture.info.dtype in _STORED.values() else "float32"
    units = [unit_roundoff(_STORED.get(stored, model))]
    if steps > 1:
        units.append(unit_roundoff(model))
    terms = max(width, int(capture.info.model_config.get("hidden_size", 0)), 1)
    single = ROUNDINGS * max(units) + _ORDER * math.sqrt(terms) * unit_roundoff("float32")
    return single * math.sqrt(steps)


def _apart(
    point: str,
    first: NDArray[np.generic],
    second: NDArray[np.generic],
    rerouted: NDArray[np.bool_],
    allowed: float,
) -> Apart:
    rows, differing = len(first), int((~same_bits(first, second)).sum())
    if not differing:
        return Apart(point, rows, 0, 0.0, allowed)
    if point.endswith("expert_ids"):
        return Apart(point, rows, differing, None, 0.0)
    kept = ~rerouted if not rerouted.all() else np.ones(rows, bool)
    size, nonfinite = relative_size(point, first[kept], second[kept])
    return Apart(point, rows, differing, size, allowed, nonfinite, int(rerouted.sum()))


def _so_far(flipped: NDArray[np.bool_], chains: Chains) -> NDArray[np.bool_]:
    """Rows (bool [flat]) that have seen a flipped token, their own included."""
    parts = np.split(flipped, np.cumsum(chains.lengths)[:-1])
    return np.concatenate([np.logical_or.accumulate(part) for part in parts])


def _laid_out(capture: Capture, point: str, rows: NDArray[np.intp]) -> NDArray[Any]:
    values = capture.read(point, rows)
    stem, _, what = point.rpartition(".expert_")
    if what == "ids":
        return np.sort(values, axis=1)
    if what in ("weights", "in", "out"):
        numbers = f"{stem}.expert_ids"
        if capture.has(numbers)[rows].all():
            order = capture.read(numbers, rows).argsort(1, kind="stable")
            return np.take_along_axis(values, order if what == "weights" else order[..., None], 1)
    return values
