"""SwiGLU in Triton: silu and the product in float32, rounded once.

Every element is computed by itself, so there is no order of reduction to choose: the fast and the
deterministic form are one kernel and give the same bits. They differ only in how many elements a
program takes, which the fast form chooses by their number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layerbisect.kernels.triton_forms.common import Build, interpreting, narrowed

_BLOCK = 1024
_SMALL_BLOCK = 256
# elements from which on large blocks still make some programs for each compute unit
_MANY = 1 << 19


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(
    gate: tl.tensor,
    up: tl.tensor,
    y: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    z = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    # exp(-z) would overflow where z is very negative
    decayed = tl.exp(-tl.abs(z))
    silu = tl.where(z < 0, z * decayed, z) / (1 + decayed)
    value = silu * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, narrowed(value, y.dtype.element_ty, INTERPRETED), mask=inside)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
    """Multiply ``up`` by silu of ``gate``, both of one shape, bfloat16, float16 or float32.

    Returns the shape and dtype of ``gate``. Raises ValueError when the shapes differ.
    """
    if up.shape != gate.shape:
        raise ValueError(f"up must have shape {list(gate.shape)}, got {list(up.shape)}")
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    count = gate.numel()
    block = _BLOCK if deterministic or count >= _MANY else _SMALL_BLOCK
    _swiglu[(triton.cdiv(count, block),)](
        gate.contiguous(),
        up.contiguous(),
        y,
        count,
        BLOCK=block,
        INTERPRETED=interpreting(),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y


def builds() -> list[Build]:
    """Return the kernel in bfloat16, for many elements."""
    return [
        Build(
            "swiglu",
            _swiglu,
            {"gate": "*bf16", "up": "*bf16", "y": "*bf16", "count": "i32:16"},
            {"BLOCK": _BLOCK, "INTERPRETED": False},
        )
    ]
