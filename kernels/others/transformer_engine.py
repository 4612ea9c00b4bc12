"""TransformerEngine's modules in inference, each without tensor parallelism or low precision.

Written against TransformerEngine 2.20; never run by this project, since it needs a GPU. Attention
has one implementation for each of its three backends: the other two are switched off by
TransformerEngine's own environment variables during the call, and it raises where the one left
cannot serve.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

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

_BACKENDS = {"te-flash": "FLASH", "te-fused": "FUSED", "te-unfused": "UNFUSED"}


def implementations(operator: str, device: str) -> list[Found]:
    """Return TransformerEngine's implementations of ``operator``; Unavailable ones say why."""
    refusals = [device_refuses(device, kind) for kind in ("cuda", "hip")]
    why = missing("transformer_engine") or (None if None in refusals else refusals[0])
    found: list[Found] = []
    for name, run in _runs(operator):
        if why:
            found.append(Unavailable(name, operator, why))
        else:
            found.append(Implementation(name, operator, version("transformer_engine"), run))
    return found


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    eps: float,
    rounds_before_weight: bool | None = None,
) -> torch.Tensor:
    """Run RMSNorm, which rounds once."""
    from transformer_engine.pytorch import RMSNorm

    refuse("te", "rounds_before_weight", rounds_before_weight, None, False)
    refuse_tensor("te", "residual", residual)
    norm = RMSNorm(len(weight), eps=eps, device=x.device, dtype=weight.dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        made: torch.Tensor = norm(x)
    return made


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Run Linear."""
    from transformer_engine.pytorch import Linear

    out, channels = weight.shape
    layer = Linear(
        channels, out, bias=bias is not None, params_dtype=weight.dtype, device=x.device
    ).eval()
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
        made: torch.Tensor = layer(x)
    return made


def rope(
    x: torch.Tensor,
    position: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Run the fused apply_rotary_pos_emb, every row a sequence of one that starts where it lies."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    refuse("te", "attention_scaling", attention_scaling, 1.0)
    if not len(x):
        return x.clone()
    every = torch.arange(int(position.max()) + 1, device=x.device, dtype=torch.float32)
    angle = every[:, None] * inv_freq.float()
    angle = angle.repeat_interleave(2, dim=1) if interleaved else torch.cat([angle, angle], dim=1)
    made: torch.Tensor = apply_rotary_pos_emb(
        x[:, None],
        angle[:, None, None],
        tensor_format="bshd",
        start_positions=position.int(),
        interleaved=interleaved,
        fused=True,
    )
    return made[:, 0]


def attention(
    name: str,
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
    """Run DotProductAttention on sequences end to end, with one backend switched on."""
    from transformer_engine.pytorch import DotProductAttention
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    refuse_tensor(name, "sinks", sinks)
    counts = queries or lengths
    module = DotProductAttention(
        q.shape[1],
        q.shape[2],
        num_gqa_groups=k.shape[1],
        qkv_format="thd",
        # the last query of each sequence sees all its keys
        attn_mask_type="padding_causal_bottom_right",
        window_size=(-1, 0) if sliding_window is None else (sliding_window - 1, 0),
        softmax_scale=scale,
    ).eval()
    switches = {f"NVTE_{b}_ATTN": str(int(b == _BACKENDS[name])) for b in _BACKENDS.values()}
    # it remembers what it chose last time
    choice = dot_product_attention._attention_backends
    choice["backend_selection_requires_update"] = True
    try:
        with mock.patch.dict(os.environ, switches), torch.no_grad():
            made: torch.Tensor = module(
                q.contiguous(),
                k.contiguous(),
                v.contiguous(),
                cu_seqlens_q=starts(counts, q.device),
                cu_seqlens_kv=starts(lengths, q.device),
                max_seqlen_q=max(counts, default=0),
                max_seqlen_kv=max(lengths, default=0),
            )
    except ValueError as error:
        if "No dot product attention backend" not in str(error):
            raise
        raise Unsupported(
            f"{name} does not support queries={queries!r}, sliding_window={sliding_window!r} in "
            f"{q.dtype}; TransformerEngine says why with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2"
        ) from None
    finally:
        choice["backend_selection_requires_update"] = True
    return made.view_as(q)


def logprob(
    logits: torch.Tensor, targets: torch.Tensor, *, shards: int | None = None
) -> torch.Tensor:
    """Run parallel_cross_entropy in one part; it writes into its logits, so they are a copy."""
    from transformer_engine.pytorch import parallel_cross_entropy

    refuse("te", "shards", shards, None, 1)
    refuse("te", "dtype", logits.dtype, torch.bfloat16, torch.float32)
    with torch.no_grad():
        wanted = targets.clamp(min=0)[None]
        loss: torch.Tensor = parallel_cross_entropy(logits[None].clone(), wanted)
    return (-loss[0]).masked_fill(targets < 0, torch.nan)


_RUNS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "linear": linear,
    "rope": rope,
    "logprob": logprob,
}


def _runs(operator: str) -> Sequence[tuple[str, Callable[..., Any]]]:
    if operator == "attention":
        return [(name, partial(attention, name)) for name in _BACKENDS]
    return [("te", _RUNS[operator])] if operator in _RUNS else []
