"""Top-k routing of tokens to experts.

    weights = top-k of softmax(logits), divided by their sum where the model renormalises

(Shazeer et al. 2017, arXiv:1701.06538; softmax before top-k as in Qwen3-MoE.) The low-precision
form computes the softmax in the compute dtype, as engines do in float32, and rounds the weights.
"""

from __future__ import annotations

import torch

from layerbisect.kernels.rounding import require_compute_dtype, rounded


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalise: bool,
    round_to: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts a row from ``logits`` [row, expert], float32 or float64.

    Returns the weights [row, slot] in the dtype of the logits, largest first, and the experts'
    numbers int64 [row, slot]. Of equal logits the lower number wins, on every device. Raises
    TypeError for another dtype and ValueError when there are fewer experts than ``top_k``.
    """
    require_compute_dtype("logits", logits)
    if logits.ndim != 2 or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(
            f"logits must have shape [row, expert] with at least top_k={top_k} experts, "
            f"got {list(logits.shape)}"
        )
    # softmax keeps the order, and torch.topk breaks ties differently on each device
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.softmax(logits, dim=-1).gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return rounded(weights, round_to), ids
