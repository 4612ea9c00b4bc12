"""Directions in which a bug would move a captured point, which the systematic test fits."""

from __future__ import annotations

import torch

from layerbisect.bisect.operators import LayerPoints
from layerbisect.kernels.judging.directions import (
    SCALES,
    STEP,
    added_share,
    norm_eps_direction,
    norm_eps_unit,
)


def directions_of(points: LayerPoints, suffix: str) -> dict[str, torch.Tensor]:
    """Map a direction's name to the output's derivative by it, of the output's shape.

    A fitted coefficient is then the size of the bug: 0.03 for ``softmax scale`` means that the
    scale is 3 % too large.
    """
    hidden = points.hidden(suffix)
    if hidden:
        exact = points.compute(suffix)
        return {
            f"scale of {name}": (points.scaled(name, 1 + STEP).compute(suffix) - exact) / STEP
            for name in SCALES
            if name in hidden
        }
    if suffix in ("attn.norm", "mlp.norm"):
        stream = points.get("input" if suffix == "attn.norm" else "mid")
        eps = points.model.config.eps
        return {"eps": norm_eps_direction(points.compute(suffix), stream, eps)}
    if suffix == "attn.context":
        moved = points.scaled("attn.q", 1 + STEP).compute(suffix)
        return {"softmax scale": (moved - points.compute(suffix)) / STEP}
    if suffix == "mid":
        return {added_share(suffix): points.get("attn.out")}
    if suffix == "output":
        return {added_share(suffix): points.get("mlp.out")}
    return {}


def units_of(points: LayerPoints, suffix: str) -> dict[str, float]:
    """Map a direction to the size of the bug at a coefficient of one, where that is not one."""
    if suffix in ("attn.norm", "mlp.norm") and not points.hidden(suffix):
        return {"eps": norm_eps_unit(points.get("input" if suffix == "attn.norm" else "mid"))}
    return {}
