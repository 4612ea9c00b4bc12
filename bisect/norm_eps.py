"""A wrong eps of the q/k norms, told from cosine and sine that are scaled.

Both norms of a layer have one eps, so a larger one shrinks all queries and keys nearly alike, as a
scaled rotary embedding does. But it shrinks small heads by more than large ones, and where sizes
differ enough, over enough rows, that tells the two apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from layerbisect.bisect.operators import LayerPoints
from layerbisect.bisect.precision import FULL
from layerbisect.kernels.judging.measure import quantile
from layerbisect.kernels.judging.own_error import MEDIAN_RATIO, SYSTEMATIC_Z, OwnError

_ITERATIONS = 30
_TINY = 1e-30
_SAME_EPS = 1.5
"""Two changes of eps that are fitted, each with its error, may differ by this and be one."""

Cause = Literal["norm", "rope", "either"]


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """What an engine made by way of an RMS norm, and what is right: float64 [row, head, channel].

    ``square`` [row, head, 1] is the mean square of the norm's input, with the right eps added.
    """

    values: torch.Tensor
    right: torch.Tensor
    square: torch.Tensor
    eps: float

    def with_eps(self, change: float) -> torch.Tensor:
        """What would be right if eps were larger by ``change``: [row, head, channel]."""
        return self.right * (self.square / (self.square + change)).sqrt()


def shrunk_by(normed: Sequence[Normed]) -> float:
    """Fit the one change of eps by which all of ``normed`` come nearest to their values."""
    along = torch.cat([(n.values * n.right).sum(-1).flatten() for n in normed])
    weight = torch.cat([n.right.square().sum(-1).flatten() for n in normed]).clamp_min(_TINY)
    square = torch.cat([n.square.flatten() for n in normed])
    wanted, change = along / weight, 0.0
    for _ in range(_ITERATIONS):
        factor = (square / (square + change)).sqrt()
        slope = -0.5 * factor / (square + change)
        step = (weight * slope * (wanted - factor)).sum() / (weight * slope.square()).sum()
        # no eps is below zero
        change = max(change + float(step), -normed[0].eps)
    return change


def scaled_or_shrunk(
    points: LayerPoints, factor: float, rows: torch.Tensor, rounding: float
) -> tuple[Cause, float]:
    """Say whether a change of eps explains queries and keys that all are ``factor`` times right.

    ``rope`` where it does not, ``norm`` where the factor does not beside it, and ``either``; with
    the change of eps. ``rounding`` is by how much rounding sets values apart.
    """
    if not points.model.config.qk_norm:
        return "rope", 0.0
    normed = [_of_heads(points, which, rows) for which in (0, 1)]
    change = shrunk_by(normed)
    if any(apart(n.values, n.with_eps(change)) >= rounding for n in normed):
        return "rope", change
    share, error = _share_of_scale(normed, factor, change)
    by_scale, by_eps = share > SYSTEMATIC_Z * error, 1 - share > SYSTEMATIC_Z * error
    if by_scale == by_eps:
        return "either", change
    return ("rope" if by_scale else "norm"), change


def _of_heads(points: LayerPoints, which: int, rows: torch.Tensor) -> Normed:
    name = ("attn.q", "attn.k")[which]
    values, eps = points.captured(name), points.model.config.eps
    assert values is not None
    raw = points.model.qkv_raw(points.layer, points.get("attn.norm"), precision=FULL)[which]
    square = raw[rows].double().square().mean(-1, keepdim=True) + eps
    return Normed(values[rows].double(), points.compute(name)[rows].double(), square, eps)


def _share_of_scale(normed: Sequence[Normed], factor: float, change: float) -> tuple[float, float]:
    """Place the values between both explanations: 0 at the eps, 1 at the scale.

    Returns the place and its standard error, which holds when errors within a row depend on one
    another (Liang and Zeger 1986).
    """
    along = torch.zeros(len(normed[0].values), dtype=torch.float64)
    weight = torch.zeros_like(along)
    for one in normed:
        by_eps = one.with_eps(change)
        toward = factor * one.right - by_eps
        along += ((one.values - by_eps) * toward).sum((1, 2))
        weight += toward.square().sum((1, 2))
    total = weight.sum().clamp_min(_TINY)
    share = along.sum() / total
    return float(share), float((along - share * weight).square().sum().sqrt() / total)


def others_err_by(points: LayerPoints, change: float, errors: Iterable[OwnError]) -> bool:
    """Whether another norm of the layer is convicted, and the same change of eps explains it."""
    convicted = {error.point: error for error in errors if error.convicted}
    for suffix, before in (("attn.norm", "input"), ("mlp.norm", "mid")):
        error = convicted.get(points.name(suffix))
        values, stream = points.captured(suffix), points.captured(before)
        if error is None or values is None or stream is None:
            continue
        rows, eps = error.flat_rows, points.model.config.eps
        right = points.compute(suffix)[rows].double()
        low = points.compute(suffix, points.side.low)[rows]
        square = stream[rows].double().square().mean(-1, keepdim=True) + eps
        normed = Normed(values[rows].double(), right, square, eps)
        own = shrunk_by([normed])
        alike = own * change > 0 and 1 / _SAME_EPS < own / change < _SAME_EPS
        if alike and apart(normed.values, normed.with_eps(own)) < MEDIAN_RATIO * apart(low, right):
            return True
    return False


def apart(values: torch.Tensor, right: torch.Tensor) -> float:
    """Difference relative to the size of what is right, in nearly all rows: in a tenth it is more.

    A fault in some rows alone must not pass for none.
    """
    off = (values.double() - right.double()).flatten(1).square().mean(1).sqrt()
    size = right.double().flatten(1).square().mean(1).sqrt().clamp_min(_TINY)
    return quantile(off / size, 0.9)
