"""Directions in which a bug would move an operator's output: what the systematic test fits."""

from __future__ import annotations

from collections.abc import Collection

import torch

from layerbisect.kernels.judging.measure import By

STEP = 1e-4
"""Relative change by which a derivative is taken."""
SCALES = ("attn.q", "attn.v", "attn.out", "mlp.norm", "mlp.out")
"""Of a stretch of several operators: hidden points whose scale a bug may have changed."""
_BY_CHANNEL = ("attn.norm", "mlp.norm", "attn.out", "mlp.out", "mlp.router_logits", "final_norm")


def gains_of(suffix: str, covers: Collection[str]) -> tuple[By, ...]:
    """Say at which grain a wrong factor on a point's values is looked for.

    Only for operators judged alone: where several lie in a stretch, a factor within it is looked
    for instead. ``suffix`` is the point's name within its layer.
    """
    if suffix == "mlp.expert_out" and set(covers) <= {"dispatch", "experts"}:
        # which expert is in which slot is another one in each row, and no copy is scaled
        return ("all", "expert")
    if len(covers) > 1 and suffix not in ("attn.q", "attn.k"):
        return ()
    return ("all", "channel") if suffix in _BY_CHANNEL else ("all", "head")


def added_share(suffix: str) -> str:
    """Name the direction of a residual sum's second term."""
    part = "attention" if suffix == "mid" else "MLP"
    return f"share of the {part} output added"


def norm_eps_unit(stream: torch.Tensor) -> float:
    """A tenth of the mean square: the eps that moves an RMS norm's output by a twentieth."""
    return 0.1 * float(stream.square().mean())


def norm_eps_direction(exact: torch.Tensor, stream: torch.Tensor, eps: float) -> torch.Tensor:
    """Derivative of an RMS norm's output by its eps, in units of `norm_eps_unit`."""
    mean_square = stream.square().mean(-1, keepdim=True)
    return -0.5 * exact * (norm_eps_unit(stream) / (mean_square + eps))
