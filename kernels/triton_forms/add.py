"""Residual sum in Triton: ``stream + delta``, summed in float32 and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layerbisect.kernels.triton_forms.common import Build, interpreting, narrowed, require_dtype

_BLOCK = 1024


def add(stream: torch.Tensor, delta: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
    """Add ``delta`` to ``stream``, both [row, hidden] of one dtype: the same shape and dtype.

    Nothing is summed but two numbers, so that both forms are one. Raises ValueError for shapes or
    dtypes that differ, and Unsupported for a dtype but bfloat16, float16 and float32.
    """
    if stream.shape != delta.shape or stream.dtype != delta.dtype:
        raise ValueError(
            "stream and delta must have one shape and dtype, got "
            f"{list(stream.shape)} {stream.dtype} and {list(delta.shape)} {delta.dtype}"
        )
    require_dtype("stream", stream)
    stream, delta = stream.contiguous(), delta.contiguous()
    y = torch.empty_like(stream)
    if count := stream.numel():
        _add_kernel[(triton.cdiv(count, _BLOCK),)](
            stream,
            delta,
            y,
            count,
            BLOCK=_BLOCK,
            INTERPRETED=interpreting(),
            enable_fp_fusion=False,
        )
    return y


def builds() -> list[Build]:
    """Return what to compile without a GPU."""
    signature = dict.fromkeys(("stream", "delta", "y"), "*bf16") | {"count": "i32"}
    return [Build("add", _add_kernel, signature, {"BLOCK": _BLOCK, "INTERPRETED": False})]


@triton.jit  # type: ignore[untyped-decorator]
def _add_kernel(
    stream: tl.tensor,
    delta: tl.tensor,
    y: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(stream + at, mask=at < count).to(tl.float32)
    total += tl.load(delta + at, mask=at < count).to(tl.float32)
    tl.store(y + at, narrowed(total, y.dtype.element_ty, INTERPRETED), mask=at < count)
