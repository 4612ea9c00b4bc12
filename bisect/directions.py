"""Directions in which a bug would move an operator's output: what the systematic test fits."""

from __future__ import annotations

import torch

from layerbisect.bisect.operators import LayerPoints
from layerbisect.kernels.judging.measure import By

_STEP = 1e-4
# of a stretch of several operators: points whose scale a bug may have changed
_SCALES = ("attn.q", "attn.v", "attn.out", "mlp.norm", "mlp.out")
_BY_CHANNEL = ("attn.norm", "mlp.norm", "attn.out", "mlp.out", "mlp.router_logits")


def gains_of(points: LayerPoints, suffix: str) -> tuple[By, ...]:
    """Say at which grain a wrong factor on a point's values is looked for.

    Only for operators judged alone: where several lie in a stretch, a factor within it is looked
    for instead.
    """
    covers = points.covers(suffix)
    if suffix == "mlp.expert_out" and set(covers) <= {"dispatch", "experts"}:
        # which expert is in which slot is another one in each row, and no copy is scaled
        return ("all", "expert")
    if len(covers) > 1 and suffix not in ("attn.q", "attn.k"):
        return ()
    return ("all", "channel") if suffix in _BY_CHANNEL else ("all", "head")


def directions_of(points: LayerPoints, suffix: str) -> dict[str, torch.Tensor]:
    """Map a direction's name to the output's derivative by it, of the output's shape.

    A fitted coefficient is then the size of the bug: 0.03 for ``softmax scale`` means that the
    scale is 3 % too large.
    """
    hidden = points.hidden(suffix)
    if hidden:
        exact = points.compute(suffix)
        return {
            f"scale of {name}": (points.scaled(name, 1 + _STEP).compute(suffix) - exact) / _STEP
            for name in _SCALES
            if name in hidden
        }
    if suffix in ("attn.norm", "mlp.norm"):
        stream = points.get("input" if suffix == "attn.norm" else "mid")
        eps = points.model.config.eps
        return {"eps": norm_eps_direction(points.compute(suffix), stream, eps)}
    if suffix == "attn.context":
        moved = points.scaled("attn.q", 1 + _STEP).compute(suffix)
        return {"softmax scale": (moved - points.compute(suffix)) / _STEP}
    if suffix == "mid":
        return {"share of the attention output added": points.get("attn.out")}
    if suffix == "output":
        return {"share of the MLP output added": points.get("mlp.out")}
    return {}


def units_of(points: LayerPoints, suffix: str) -> dict[str, float]:
    """Map a direction to the size of the bug at a coefficient of one, where that is not one."""
    if suffix in ("attn.norm", "mlp.norm") and not points.hidden(suffix):
        return {"eps": norm_eps_unit(points.get("input" if suffix == "attn.norm" else "mid"))}
    return {}


def norm_eps_unit(stream: torch.Tensor) -> float:
    """A tenth of the mean square: the eps that moves an RMS norm's output by a twentieth."""
    return 0.1 * float(stream.square().mean())


def norm_eps_direction(exact: torch.Tensor, stream: torch.Tensor, eps: float) -> torch.Tensor:
    """Derivative of an RMS norm's output by its eps, in units of `norm_eps_unit`."""
    mean_square = stream.square().mean(-1, keepdim=True)
    return -0.5 * exact * (norm_eps_unit(stream) / (mean_square + eps))
