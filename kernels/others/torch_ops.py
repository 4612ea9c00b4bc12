"""torch's own kernels, and the plain PyTorch that modules of transformers are written in.

``torch`` is the ordinary form of each operator. Attention has one implementation for each backend
of F.scaled_dot_product_attention; each is forced, so that torch raises rather than take another.
The backends for GPUs were never run by this project on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from layerbisect.kernels.others.common import Found, asked, refuse, refuse_tensor
from layerbisect.kernels.others.torch_attention import attention_implementations
from layerbisect.kernels.replay.implementation import Implementation, Unsupported


def implementations(operator: str, device: str) -> list[Found]:
    """Return torch's implementations of ``operator``; on a CPU some backends are Unavailable."""
    if operator == "attention":
        return attention_implementations(device)
    package = f"torch {torch.__version__}"
    return [Implementation(name, operator, package, run) for name, run in _RUNS.get(operator, ())]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    rounds_before_weight: bool | None = None,
) -> torch.Tensor:
    """Normalise as transformers' Llama and GPT-OSS modules do, in float32 up to the rounding."""
    wide = x.float() if residual is None else x.float() + residual.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if rounds_before_weight is not False:
        return weight * normed.to(x.dtype)
    return (weight.float() * normed).to(x.dtype)


def fused_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    rounds_before_weight: bool | None = None,
) -> torch.Tensor:
    """Normalise by F.rms_norm, which rounds once."""
    refuse("torch-rms-norm", "rounds_before_weight", rounds_before_weight, None, False)
    if residual is None:
        return functional.rms_norm(x, weight.shape, weight, eps)
    # the float32 sum is normed, so nothing may be rounded before
    wide = x.float() + residual.float()
    return functional.rms_norm(wide, weight.shape, weight.float(), eps).to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Project by F.linear."""
    return functional.linear(x, weight, bias)


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Project by torch.matmul, as engines do for the language-model head."""
    refuse_tensor("torch-matmul", "bias", bias)
    return torch.matmul(x, weight.t())


def rope(
    x: torch.Tensor,
    position: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Turn as transformers does: cosine and sine in float32, then rounded to the dtype of x."""
    angle = position.float()[:, None] * inv_freq.float()
    cos = (angle.cos() * attention_scaling).to(x.dtype)[:, None]
    sin = (angle.sin() * attention_scaling).to(x.dtype)[:, None]
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def router(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    renormalise: bool,
    scoring: str = "softmax",
    softmax_after_top_k: bool = False,
    groups: int | None = None,
    top_groups: int | None = None,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as transformers' Qwen3-MoE, GPT-OSS and DeepSeek-V3 modules do, in float32."""
    refuse("torch", "scoring", scoring, "softmax", "sigmoid")
    wide = logits.float()
    if softmax_after_top_k:
        if scoring != "softmax" or groups is not None or bias is not None:
            raise Unsupported(
                "torch supports softmax_after_top_k=True with softmax alone, got "
                f"scoring={scoring!r}, groups={groups!r}, bias={bias is not None}"
            )
        chosen, ids = torch.topk(wide, top_k, dim=-1)
        return torch.softmax(chosen, dim=-1) * scaling, ids
    scores = torch.softmax(wide, dim=-1) if scoring == "softmax" else torch.sigmoid(wide)
    choice = scores if bias is None else scores + bias.float()
    if groups is not None and top_groups is not None:
        choice = _within_groups(choice, groups, top_groups, bias is not None)
    ids = torch.topk(choice, top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scaling, ids


def _within_groups(
    choice: torch.Tensor, groups: int, top_groups: int, biased: bool
) -> torch.Tensor:
    grouped = choice.unflatten(1, (groups, -1))
    score = grouped.topk(2, dim=-1).values.sum(-1) if biased else grouped.amax(-1)
    kept = torch.zeros_like(score, dtype=torch.bool)
    kept.scatter_(1, score.topk(top_groups, dim=-1).indices, True)
    eligible: torch.Tensor = grouped.masked_fill(~kept[..., None], -torch.inf)
    return eligible.flatten(1)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gate by F.silu and a product, each rounded."""
    return functional.silu(gate) * up


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Sum experts one by one into the output, as transformers' modules do."""
    total = torch.zeros_like(x)
    for expert in torch.unique(ids[ids >= 0]).tolist():
        rows, slots = torch.where(ids == expert)
        gate, up = functional.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        out = functional.linear(swiglu(gate, up), down[expert])
        total.index_add_(0, rows, (out * weights[rows, slots, None]).to(x.dtype))
    return total


def grouped_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Sum experts by F.grouped_mm over rows in the order of their experts, then over slots."""
    rows, slots = torch.where(ids >= 0)
    order = torch.argsort(ids[rows, slots], stable=True)
    rows, slots = rows[order], slots[order]
    ends = torch.bincount(ids[rows, slots], minlength=len(gate_up)).cumsum(0).int()
    made = functional.grouped_mm(x[rows], gate_up.transpose(1, 2), offs=ends)
    gate, up = made.chunk(2, dim=-1)
    out = functional.grouped_mm(swiglu(gate, up), down.transpose(1, 2), offs=ends)
    # [row, slot, hidden], 0 where a slot is unused
    terms = x.new_zeros(*ids.shape, x.shape[1])
    terms[rows, slots] = (out * weights[rows, slots, None]).to(x.dtype)
    return terms.sum(1)


def combine(outputs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Sum the used slots in one call."""
    return outputs.masked_fill((ids < 0)[..., None], 0).sum(1)


def logprob(
    logits: torch.Tensor, targets: torch.Tensor, *, shards: int | None = None
) -> torch.Tensor:
    """Gather from torch.log_softmax of float32 logits."""
    refuse("torch", "shards", shards, None, 1)
    return asked(torch.log_softmax(logits.float(), dim=-1), targets)


def add(stream: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Add."""
    return stream + delta


_RUNS: dict[str, Sequence[tuple[str, Callable[..., Any]]]] = {
    "rms_norm": (("torch", rms_norm), ("torch-rms-norm", fused_rms_norm)),
    "linear": (("torch", linear), ("torch-matmul", matmul)),
    "rope": (("torch", rope),),
    "router": (("torch", router),),
    "swiglu": (("torch", swiglu),),
    "experts": (("torch", experts), ("torch-grouped-mm", grouped_experts)),
    "combine": (("torch", combine),),
    "logprob": (("torch", logprob),),
    "add": (("torch", add),),
}
