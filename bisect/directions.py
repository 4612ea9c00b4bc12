"""Directions in which a bug would move an operator's output: what the systematic test fits."""

from __future__ import annotations

import torch

from layerbisect.bisect.measure import each_channel
from layerbisect.bisect.operators import LayerPoints

_STEP = 1e-4


def directions_of(points: LayerPoints, suffix: str) -> dict[str, torch.Tensor]:
    """Map a direction's name to the output's derivative by it, of the output's shape.

    A fitted coefficient is then the size of the bug: 0.03 for ``softmax scale`` means that the
    scale is 3 % too large. Only operators judged alone have directions; a stretch of several has
    too many.
    """
    if len(points.covers(suffix)) > 1 and suffix not in ("attn.q", "attn.k"):
        return {}
    exact = points.compute(suffix)
    directions = {"gain": exact}
    if exact.ndim == 3:
        for head in range(exact.shape[1]):
            only = torch.zeros_like(exact)
            only[:, head] = exact[:, head]
            directions[f"head {head} gain"] = only
    if suffix in ("attn.norm", "mlp.norm", "attn.out", "mlp.out", "mlp.router_logits"):
        directions[each_channel] = exact
    if suffix in ("attn.norm", "mlp.norm"):
        stream = points.get("input" if suffix == "attn.norm" else "mid")
        directions["eps"] = norm_eps_direction(exact, stream, points.model.config.eps)
    if suffix == "attn.context":
        directions["softmax scale"] = _softmax_scale(points, exact)
    if suffix == "mid":
        directions["share of the attention output added"] = points.get("attn.out")
    if suffix == "output":
        directions["share of the MLP output added"] = points.get("mlp.out")
    return directions


def norm_eps_direction(exact: torch.Tensor, stream: torch.Tensor, eps: float) -> torch.Tensor:
    """Derivative of an RMS norm's output by its eps, per tenth of the mean square."""
    mean_square = stream.square().mean(-1, keepdim=True)
    return -0.5 * exact * (0.1 * mean_square.mean() / (mean_square + eps))


def _softmax_scale(points: LayerPoints, exact: torch.Tensor) -> torch.Tensor:
    q = points.get("attn.q") * (1 + _STEP)
    moved = points.model.attention(
        points.layer, q, points.get("attn.k"), points.get("attn.v"), points.side.chains.lengths
    )
    return (moved - exact) / _STEP
