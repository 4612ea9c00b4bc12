"""Top-k routing of tokens to experts.

    weights = top-k of softmax(logits), divided by their sum where the model renormalises

(Shazeer et al. 2017, arXiv:1701.06538; softmax before top-k as in Qwen3-MoE.) Models differ, as
read in transformers 5.19, SGLang 0.5.23 and megatron-core 0.16:

    softmax over all experts, then top-k:          Qwen3-MoE, Mixtral (which renormalises)
    top-k, then softmax over those chosen:         GPT-OSS, megatron-core without use_pre_softmax
    sigmoid, a bias added for the choice alone:    DeepSeek-V3, GLM-4
    top-k within the best groups of experts:       DeepSeek-V2 and V3

A group scores the sum of its two best biased scores where there is a bias (DeepSeek-V3,
arXiv:2412.19437), and else that of its best expert (DeepSeek-V2, arXiv:2405.04434).

The low-precision form computes the scores in the compute dtype, as engines do in float32, and
rounds the weights.
"""

from __future__ import annotations

from typing import Literal

import torch

from layerbisect.kernels.rounding import require_compute_dtype, rounded

Scoring = Literal["softmax", "sigmoid"]

SUM_EPSILON = 1e-20
"""What the models' code adds to the sum of sigmoid scores before it divides by it."""


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalise: bool,
    scoring: Scoring = "softmax",
    bias: torch.Tensor | None = None,
    softmax_after_top_k: bool = False,
    groups: int | None = None,
    top_groups: int | None = None,
    scaling: float = 1.0,
    round_to: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts a row from ``logits`` [row, expert], float32 or float64.

    ``bias`` [expert] is added to the scores for the choice alone. With ``groups`` the experts are
    so many equal runs of numbers, and only those in the best ``top_groups`` are eligible.
    ``renormalise`` and ``scaling`` are what `weigh` makes of the scores.

    Returns the weights [row, slot] in the dtype of the logits and the experts' numbers int64
    [row, slot], by descending score, the bias included. Of equal scores the lower number wins, on
    every device, and so it does among groups; scores are compared before they are rounded, as
    logits where no bias is added. Raises TypeError for another dtype and ValueError for fewer
    experts than ``top_k`` and for arguments that don't go together.
    """
    require_compute_dtype("logits", logits)
    require_routable(
        logits,
        top_k,
        scoring=scoring,
        bias=bias,
        softmax_after_top_k=softmax_after_top_k,
        groups=groups,
        top_groups=top_groups,
    )
    # softmax and sigmoid keep the order, and torch.topk breaks ties differently on each device
    choice = logits if bias is None else scores(logits, scoring) + bias.to(logits.dtype)
    order = _descending(choice)
    if groups is not None and top_groups is not None:
        by_group = choice.unflatten(1, (groups, -1))
        best = by_group.sort(dim=-1, descending=True).values[..., : 1 if bias is None else 2]
        eligible = torch.zeros_like(by_group[..., 0], dtype=torch.bool)
        eligible.scatter_(1, _descending(best.sum(-1))[:, :top_groups], True)
        eligible = eligible.repeat_interleave(by_group.shape[-1], dim=1)
        # not by scores of -inf: an eligible expert may have that
        order = order.gather(1, _descending(eligible.gather(1, order).byte()))
    ids = order[:, :top_k]
    weights = weigh(
        logits,
        ids,
        renormalise=renormalise,
        scoring=scoring,
        softmax_after_top_k=softmax_after_top_k,
        scaling=scaling,
    )
    return rounded(weights, round_to), ids


def weigh(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    renormalise: bool,
    scoring: Scoring = "softmax",
    softmax_after_top_k: bool = False,
    scaling: float = 1.0,
) -> torch.Tensor:
    """Weigh the experts ``ids`` int64 [row, slot] by ``logits`` [row, expert], whoever chose them.

    Their scores, or the softmax of their logits alone (``softmax_after_top_k``, which adds up to
    one as it is); divided by their sum with ``renormalise``; times ``scaling``. Returns the shape
    of ``ids`` in the dtype of the logits.
    """
    if softmax_after_top_k:
        weights = torch.softmax(logits.gather(1, ids), dim=-1)
    else:
        weights = scores(logits, scoring).gather(1, ids)
        if renormalise:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total if scoring == "softmax" else total + SUM_EPSILON)
    return weights if scaling == 1.0 else weights * scaling


def scores(logits: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Score every expert by its ``logits`` [row, expert]: softmax over a row, or each sigmoid."""
    return torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, dim=-1)


def require_routable(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: Scoring,
    bias: torch.Tensor | None,
    softmax_after_top_k: bool,
    groups: int | None,
    top_groups: int | None,
) -> None:
    """Raise ValueError for arguments of ``route`` that have no meaning together."""
    if logits.ndim != 2 or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(
            f"logits must have shape [row, expert] with at least top_k={top_k} experts, "
            f"got {list(logits.shape)}"
        )
    experts = logits.shape[1]
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring must be 'softmax' or 'sigmoid', got {scoring!r}")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias must have shape [{experts}], got {list(bias.shape)}")
    if softmax_after_top_k and (scoring != "softmax" or bias is not None):
        given = "a bias" if scoring == "softmax" else f"scoring {scoring!r}"
        raise ValueError(
            f"softmax_after_top_k chooses by the logits alone: leave out {given}, or set it False"
        )
    if (groups is None) != (top_groups is None):
        raise ValueError(
            f"give groups and top_groups together or neither, got {groups} and {top_groups}"
        )
    if groups is None or top_groups is None:
        return
    if groups < 1 or experts % groups or not 1 <= top_groups <= groups:
        raise ValueError(
            f"groups must divide the {experts} experts and top_groups lie in [1, groups], "
            f"got {groups} and {top_groups}"
        )
    if top_groups * (experts // groups) < top_k:
        raise ValueError(
            f"{top_groups} groups of {experts // groups} experts hold fewer than top_k={top_k}"
        )


def _descending(values: torch.Tensor) -> torch.Tensor:
    return torch.sort(values, dim=-1, descending=True, stable=True).indices
