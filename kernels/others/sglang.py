"""SGLang's kernels, found when it is installed: Triton kernels, and the backends of its classes.

On a CPU the Triton kernels run under Triton's interpreter (TRITON_INTERPRET=1, set before triton is
imported). Its dot is wrong for bfloat16, and so is its conversion to that dtype, which truncates
(3.8). A kernel that does either refuses bfloat16 there, and stands a second time in the list, for
that dtype alone, as ``NAME (in float32)``: the same kernel on the same numbers widened to float32,
with its result rounded. A product of two bfloat16 numbers is exact in float32; what differs from
the kernel as a GPU runs it is that attention does not round the probabilities to bfloat16 before
they meet the values. The interpreter's dot is NumPy's, whose order of summation may depend on where
a row lies: what it says of batch invariance is not about the kernel.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from layerbisect.kernels.others import sglang_attention, sglang_triton
from layerbisect.kernels.others.common import Found, missing, version
from layerbisect.kernels.others.sglang_modules import module_implementations
from layerbisect.kernels.replay.implementation import (
    Implementation,
    Mode,
    Unavailable,
    Unsupported,
)

_Kernel = tuple[str, Callable[..., Any], Mode, str]

_TRITON: dict[str, tuple[_Kernel, ...]] = {
    "attention": (
        ("sglang-triton-extend", sglang_attention.extend, "fast", "sglang-extend"),
        ("sglang-triton-unified", sglang_attention.unified, "deterministic", "sglang-extend"),
        (
            "sglang-triton-decode",
            partial(sglang_attention.decode, fixed_splits=False),
            "fast",
            "sglang-decode",
        ),
        (
            "sglang-triton-decode-fixed",
            partial(sglang_attention.decode, fixed_splits=True),
            "deterministic",
            "sglang-decode",
        ),
    ),
    "rms_norm": (("sglang-batch-invariant", sglang_triton.rms_norm, "deterministic", "sglang"),),
    "linear": (("sglang-batch-invariant", sglang_triton.linear, "deterministic", "sglang"),),
    "logprob": (
        ("sglang", sglang_triton.fast_logprob, "fast", "sglang"),
        ("sglang-batch-invariant", sglang_triton.logprob, "deterministic", "sglang"),
    ),
    "router": (("sglang-triton", sglang_triton.router, "unspecified", ""),),
    "experts": (
        (
            "sglang-triton",
            partial(sglang_triton.experts, deterministic=False),
            "fast",
            "sglang-triton",
        ),
        (
            "sglang-triton-fixed",
            partial(sglang_triton.experts, deterministic=True),
            "deterministic",
            "sglang-triton",
        ),
    ),
}
# what each operator's functions import; imported beforehand, since it takes seconds and may fail
_MODULES = {
    "attention": (
        "sglang.kernels.ops.attention.decode_attention",
        "sglang.kernels.ops.attention.extend_attention",
    ),
    "rms_norm": ("sglang.srt.batch_invariant_ops", "sglang.srt.layers.layernorm"),
    "linear": ("sglang.srt.batch_invariant_ops", "sglang.srt.layers.quantization.unquant"),
    "rope": ("sglang.srt.layers.rotary_embedding.base",),
    "router": ("sglang.kernels.ops.moe.moe_fused_gate", "sglang.srt.layers.moe.topk"),
    "swiglu": ("sglang.kernels.ops.activation", "sglang.srt.layers.activation"),
    "experts": (
        "sglang.srt.layers.moe.fused_moe_native",
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe",
    ),
    "logprob": ("sglang.srt.batch_invariant_ops", "sglang.srt.layers.logsumexp"),
}
# kernels that multiply matrices or store bfloat16, with the argument whose dtype the result has
_ROUNDING = {"attention": "q", "linear": "x", "rms_norm": "x"}


def implementations(operator: str, device: str) -> list[Found]:
    """Return SGLang's implementations of ``operator``; Unavailable ones say why."""
    if operator not in _MODULES:
        return []
    if why := missing("sglang") or _import_fails(operator):
        return [Unavailable("sglang", operator, why)]
    package = version("sglang")
    found: list[Found] = []
    if operator == "linear":
        plain = sglang_triton.plain_linear
        found.append(Implementation("sglang", operator, package, plain, "fast", "sglang"))
    for kernel in _TRITON.get(operator, ()):
        found += _triton(operator, device, package, kernel)
    return found + _with_family(module_implementations(operator, device, package))


def _import_fails(operator: str) -> str | None:
    """Return why SGLang's modules cannot be imported; what their imports warn of is not ours."""
    for module in _MODULES[operator]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(module)
        except Exception as error:
            return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None


def _triton(operator: str, device: str, package: str, kernel: _Kernel) -> list[Found]:
    name, function, mode, family = kernel
    if device != "cpu":
        return [Implementation(name, operator, package, function, mode, family)]
    if why := missing("triton"):
        return [Unavailable(name, operator, why)]
    from layerbisect.kernels.triton_forms.common import interpreting

    if not interpreting():
        why = "Triton runs on the CPU only with TRITON_INTERPRET=1 set before triton is imported"
        return [Unavailable(name, operator, why)]
    if operator == "experts":
        why = "SGLang sorts tokens by expert with sgl_kernel, which is compiled for GPUs alone"
        return [Unavailable(name, operator, why)]
    package = f"{package}, interpreted"
    one = Implementation(name, operator, package, partial(_quietly, function), mode, family)
    if operator not in _ROUNDING:
        return [one]
    first = _ROUNDING[operator]
    widened = partial(_in_float32, name, function, first)
    return [
        replace(one, run=partial(_but_bfloat16, name, function, first)),
        replace(one, name=f"{name} (in float32)", run=widened),
    ]


def _quietly(function: Callable[..., Any], **arguments: Any) -> Any:
    """Run without NumPy's warnings about lanes that the kernel masks."""
    import numpy

    with numpy.errstate(all="ignore"):
        return function(**arguments)


def _but_bfloat16(name: str, function: Callable[..., Any], first: str, **arguments: Any) -> Any:
    if arguments[first].dtype == torch.bfloat16:
        raise Unsupported(
            f"{name} does not support dtype=torch.bfloat16 under Triton's interpreter, which "
            f"multiplies bit patterns and truncates; '{name} (in float32)' runs the same kernel"
        )
    return _quietly(function, **arguments)


def _in_float32(name: str, function: Callable[..., Any], first: str, **arguments: Any) -> Any:
    dtype = arguments[first].dtype
    if dtype != torch.bfloat16:
        raise Unsupported(
            f"{name} (in float32) does not support dtype={dtype}: {name} itself runs in it"
        )
    wide = {
        name: value.float()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }
    return _quietly(function, **wide).to(dtype)


def _with_family(found: list[Found]) -> list[Found]:
    """Pair the norm that SGLang runs while nothing is deterministic with the batch-invariant one.

    That is the device's own method, and ``forward_native`` where there is none.
    """
    norms = [i for i in found if isinstance(i, Implementation) and i.operator == "rms_norm"]
    if not norms:
        return found
    own = next((i for i in norms if i.name in ("sglang-cuda", "sglang-hip")), norms[0])
    return [replace(own, mode="fast", family="sglang") if i is own else i for i in found]
