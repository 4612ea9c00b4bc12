"""The backends of SGLang's fused-op classes: RMSNorm, SiluAndMul, RotaryEmbedding, and its router.

A class has a method for each device (``forward_cuda``, ``forward_hip``, ...) and each source of
kernels (``forward_jit``, ``forward_aiter``, ...); which are there is read off the class, and each
is an implementation of its own, but the one compiled by torch. Many fall back to ``forward_native``
of their own accord: that is refused here, so that no implementation answers under another's name.
Written against SGLang 0.5.23; only ``native`` was ever run by this project, the others need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from layerbisect.kernels.others.common import Found, device_refuses, refuse
from layerbisect.kernels.replay.implementation import Implementation, Unavailable, Unsupported

# the devices that run a method; those of other makers are not looked for
_DEVICES = {
    "native": ("cpu", "cuda", "hip"),
    "cuda": ("cuda",),
    "hip": ("hip",),
    "aiter": ("hip",),
    "jit": ("cuda",),
    "aot": ("cuda", "hip"),
}


def module_implementations(operator: str, device: str, package: str) -> list[Found]:
    """Return one implementation for each method of the operator's class that SGLang wrote."""
    if operator == "router":
        return [Implementation("sglang-native", operator, package, router)]
    if operator == "experts":
        return [Implementation("sglang-native", operator, package, experts)]
    if operator not in _RUNS:
        return []
    run = _RUNS[operator]
    found: list[Found] = []
    classes = _classes(operator)
    for method in classes:
        name = f"sglang-{method}"
        kinds = _DEVICES[method]
        if method == "cuda" and "hip" not in classes:
            # SGLang's own way on ROCm
            kinds = ("cuda", "hip")
        refusals = [None if k == "cpu" == device else device_refuses(device, k) for k in kinds]
        if None not in refusals:
            found.append(Unavailable(name, operator, str(refusals[0])))
        else:
            found.append(Implementation(name, operator, package, partial(run, method)))
    return found


def rms_norm(
    method: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    eps: float,
    rounds_before_weight: bool | None = None,
) -> torch.Tensor:
    """Run one method of RMSNorm; it may write into its arguments, so they are copies."""
    # what its Llama and Qwen3 leave at its default rounds once
    twice = bool(rounds_before_weight)
    op = _classes("rms_norm")[method](len(weight), eps, cast_x_before_out_mul=twice)
    op.weight = torch.nn.Parameter(weight, requires_grad=False)
    if residual is None:
        made: torch.Tensor = _method(op, method)(x.clone())
    else:
        made = _method(op, method)(x.clone(), residual.clone())[0]
    return made


def swiglu(method: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Run one method of SiluAndMul."""
    op = _classes("swiglu")[method]()
    made: torch.Tensor = _method(op, method)(torch.cat([gate, up], dim=-1))
    return made


def rope(
    method: str,
    x: torch.Tensor,
    position: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Run one method of RotaryEmbedding, with its own cache of cosines of these frequencies."""
    from sglang.srt.layers.rotary_embedding import base

    class Rotary(base.RotaryEmbedding):  # type: ignore[misc]
        def _compute_inv_freq(self, base: float) -> torch.Tensor:
            return inv_freq.float()

        def _compute_cos_sin_cache(self) -> torch.Tensor:
            cache: torch.Tensor = super()._compute_cos_sin_cache()
            return cache * attention_scaling

    channels, most = x.shape[-1], int(position.max()) + 1 if len(position) else 1
    # without a GPU its constructor looks for vLLM's kernel unless SGLang serves on the CPU
    on_cpu = base._is_cpu or x.device.type == "cpu"
    with torch.device(x.device), mock.patch.object(base, "_is_cpu", on_cpu):
        op = Rotary(channels, channels, most, 10000, not interleaved, x.dtype)
    query, key = x.flatten(1).clone(), x[:, :1].flatten(1).clone()
    turned: torch.Tensor = _method(op, method)(position, query, key)[0]
    return turned.view_as(x)


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
    """Route by the PyTorch functions behind TopK.forward_native, uncompiled."""
    from sglang.srt.layers.moe import topk

    refuse("sglang-native", "scoring", scoring, "softmax", "sigmoid")
    common = (logits, logits, top_k)
    if softmax_after_top_k:
        if (scoring, groups, bias, scaling) != ("softmax", None, None, 1.0):
            raise Unsupported(
                "sglang-native supports softmax_after_top_k=True with softmax alone, got "
                f"scoring={scoring!r}, groups={groups!r}, scaling={scaling!r}"
            )
        weights, ids = topk.fused_topk_softmax_torch_raw_logits(*common, True)
    elif groups is None:
        refuse("sglang-native", "scaling", scaling, 1.0)
        weights, ids = topk.fused_topk_torch_native(*common, renormalise, bias, scoring)
    elif bias is not None:
        refuse("sglang-native", "scoring", scoring, "sigmoid")
        grouped = _uncompiled(topk.biased_grouped_topk_impl)
        weights, ids = grouped(
            logits, logits, bias, top_k, renormalise, groups, top_groups, 0, scaling, True
        )
    else:
        grouped = _uncompiled(topk.grouped_topk_gpu)
        weights, ids = grouped(*common, renormalise, groups, top_groups, 0, scaling, True, scoring)
    return weights.float(), ids.long()


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Sum experts by moe_forward_native, one after another."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig

    if bool((ids < 0).any()):
        raise Unsupported(f"sglang-native does not support unused slots, got ids={int(ids.min())}")
    layer = SimpleNamespace(num_experts=len(gate_up), w13_weight=gate_up, w2_weight=down)
    made: torch.Tensor = moe_forward_native(layer, x, (weights, ids, None), MoeRunnerConfig())
    return made


_RUNS: dict[str, Callable[..., Any]] = {"rms_norm": rms_norm, "swiglu": swiglu, "rope": rope}


def _classes(operator: str) -> dict[str, Any]:
    """Return the class that has each method of ``_DEVICES``, above the base that only raises."""
    from sglang.kernels.fused_op import BaseFusedOp

    known: tuple[type, ...]
    if operator == "rms_norm":
        from sglang.srt.layers.layernorm import RMSNorm

        known = (RMSNorm,)
    elif operator == "swiglu":
        from sglang.kernels.ops.activation import SiluAndMulOp
        from sglang.srt.layers.activation import SiluAndMul

        # what layers call, and the one below it that keeps its two CUDA kernels apart
        known = (SiluAndMul, SiluAndMulOp)
    else:
        from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

        known = (RotaryEmbedding,)
    found: dict[str, Any] = {}
    for op in known:
        above = op.__mro__[: op.__mro__.index(BaseFusedOp)]
        for method in _DEVICES:
            if any(f"forward_{method}" in vars(c) for c in above):
                found.setdefault(method, op)
    return found


def _method(op: Any, method: str) -> Callable[..., Any]:
    """Return the bound method, with the way back to ``forward_native`` closed."""
    bound: Callable[..., Any] = getattr(op, f"forward_{method}")
    if method != "native":
        op.forward_native = partial(_refuse_native, method)
    return bound


def _refuse_native(method: str, *tensors: torch.Tensor, **options: Any) -> None:
    raise Unsupported(
        f"sglang-{method} would compute forward_native in its place, for dtype="
        f"{tensors[0].dtype} and shape {list(tensors[0].shape)}"
    )


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(function, "_torchdynamo_orig_callable", function)
    return found
