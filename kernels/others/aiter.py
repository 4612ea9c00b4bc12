"""aiter's kernels for AMD GPUs.

Written against the signatures of amd-aiter's sources of August 2026; never run by this project, on
an MI355X or any other GPU. aiter itself chooses among its assembly, CK and Triton kernels by shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from layerbisect.kernels.others.common import (
    Found,
    device_refuses,
    missing,
    refuse,
    refuse_tensor,
    starts,
    version,
)
from layerbisect.kernels.replay.implementation import Implementation, Unavailable, Unsupported


def implementations(operator: str, device: str) -> list[Found]:
    """Return aiter's implementation of ``operator``, or why it cannot be used."""
    if operator not in _RUNS:
        return []
    if why := missing("aiter") or device_refuses(device, "hip"):
        return [Unavailable("aiter", operator, why)]
    return [Implementation("aiter", operator, version("amd-aiter"), _RUNS[operator])]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    eps: float,
    rounds_before_weight: bool | None = None,
) -> torch.Tensor:
    """Run rmsnorm2d_fwd, with a residual rmsnorm2d_fwd_with_add; both round once."""
    import aiter

    refuse("aiter", "rounds_before_weight", rounds_before_weight, None, False)
    # it returns finite nonsense for a weight of another dtype
    refuse("aiter", "weight's dtype", weight.dtype, x.dtype)
    rows = x.contiguous().flatten(0, -2)
    if residual is None:
        made: torch.Tensor = aiter.rmsnorm2d_fwd(rows, weight, eps)
        return made.view_as(x)
    out, total = torch.empty_like(rows), torch.empty_like(rows)
    aiter.rmsnorm2d_fwd_with_add(
        out, rows, residual.contiguous().flatten(0, -2), total, weight, eps
    )
    return out.view_as(x)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Run tgemm.mm, which looks the shape up in tuned tables."""
    from aiter.tuned_gemm import tgemm

    made: torch.Tensor = tgemm.mm(x, weight, bias, otype=x.dtype)
    return made


def rope(
    x: torch.Tensor,
    position: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Run rope_cached_fwd with a cosine and sine for each row, in the dtype of x."""
    import aiter

    angle = position.float()[:, None] * inv_freq.float()
    # [sequence, batch, head, channel], where every row has its own angle
    cos = (angle.cos() * attention_scaling).to(x.dtype)[:, None, None]
    sin = (angle.sin() * attention_scaling).to(x.dtype)[:, None, None]
    made: torch.Tensor = aiter.rope_cached_fwd(
        x.contiguous()[:, None], cos.contiguous(), sin.contiguous(), int(interleaved), True, False
    )
    return made[:, 0]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    lengths: Sequence[int],
    scale: float,
    queries: Sequence[int] | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Run flash_attn_varlen_func, whose last query sees all keys."""
    import aiter

    refuse("aiter", "dtype", q.dtype, torch.bfloat16, torch.float16)
    counts = queries or lengths
    more = {} if sinks is None else {"sink_ptr": sinks.float()}
    made = aiter.flash_attn_varlen_func(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        starts(counts, q.device),
        starts(lengths, q.device),
        max(counts, default=0),
        max(lengths, default=0),
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1, 0) if sliding_window is None else (sliding_window - 1, 0, 0),
        **more,
    )
    context: torch.Tensor = made[0] if isinstance(made, tuple | list) else made
    return context


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
    """Run fused_topk for a softmax, biased_grouped_topk for a biased sigmoid."""
    import aiter
    from aiter.fused_moe import fused_topk

    refuse("aiter", "scoring", scoring, "softmax", "sigmoid")
    refuse("aiter", "softmax_after_top_k", softmax_after_top_k, False)
    if scoring == "softmax":
        refuse_tensor("aiter", "bias", bias)
        refuse("aiter", "groups", groups, None)
        refuse("aiter", "scaling", scaling, 1.0)
        weights, ids = fused_topk(logits, logits, top_k, renormalise)
        return weights[: len(logits)], ids[: len(logits)].long()
    if bias is None:
        raise Unsupported("aiter supports scoring='sigmoid' with a bias alone, got None")
    weights = torch.empty(len(logits), top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(len(logits), top_k, dtype=torch.int32, device=logits.device)
    aiter.biased_grouped_topk(
        logits,
        bias.to(logits.dtype),
        weights,
        ids,
        groups or 1,
        top_groups or 1,
        renormalise,
        scaling,
    )
    return weights, ids.long()


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Run silu_and_mul."""
    import aiter

    out = torch.empty_like(gate)
    aiter.silu_and_mul(out, torch.cat([gate, up], dim=-1))
    return out


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Run fused_moe on weights shuffled as its kernels want them."""
    from aiter.fused_moe import fused_moe
    from aiter.ops.shuffle import shuffle_weight

    refuse("aiter", "dtype", x.dtype, torch.bfloat16, torch.float16)
    if bool((ids < 0).any()):
        raise Unsupported(f"aiter does not support unused slots, got ids={int(ids.min())}")
    made: torch.Tensor = fused_moe(
        x.contiguous(),
        shuffle_weight(gate_up.contiguous(), (16, 16)),
        shuffle_weight(down.contiguous(), (16, 16)),
        weights.float(),
        ids.int(),
    )
    return made


_RUNS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "linear": linear,
    "rope": rope,
    "attention": attention,
    "router": router,
    "swiglu": swiglu,
    "experts": experts,
}
