"""What the Triton forms share.

Triton chooses between compiling and interpreting when it is imported, and so do our kernels:
``TRITON_INTERPRET=1`` must be set before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from layerbisect.kernels.replay.implementation import Unsupported


def interpreting() -> bool:
    """Whether kernels are run by Triton's interpreter, on the CPU.

    Its dot multiplies the bit patterns of bfloat16 operands (3.8 and 3.9), so that kernels convert
    them to float32 first, where a product of two bfloat16 numbers is exact.
    """
    # decorated when triton was imported, whatever became of the environment since
    return not isinstance(tl.zeros, triton.JITFunction)


def require_dtype(name: str, x: torch.Tensor) -> None:
    """Raise Unsupported unless ``x`` has a dtype that a sum in float32 is wide enough for."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Unsupported(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` contiguous and at a multiple of 16 bytes, copied where it isn't.

    Triton compiles a kernel anew for a pointer that isn't, and may lay out and order what it sums
    in another way: some rows of a batch, passed by themselves, would get other bits.
    """
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel with the types and constants of a realistic launch, to be compiled without a GPU.

    ``signature`` names the type of each argument that is no constant ("*bf16", "i32", "fp32");
    ``constexprs`` holds the value of each one that is. A pointer is taken as aligned to 16 bytes,
    and a number as a multiple of 16 where its type says so ("i32:16").
    """

    name: str
    fn: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4


@triton.jit  # type: ignore[untyped-decorator]
def narrowed(x: tl.tensor, dtype: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Round float32 ``x`` to nearest in ``dtype``, a tie to even.

    The interpreter cuts off what bfloat16 has no bits for (3.8), at twice the error and always
    towards zero.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        cut = (bits & -0x10000).to(tl.float32, bitcast=True)
        # adding to the bits of a nan may make them those of another number
        x = tl.where(x == x, cut, x)
    return x.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def dot(a: tl.tensor, b: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Multiply ``a`` [row, k] by ``b`` [k, column] of one dtype, in float32.

    The interpreter's own dot multiplies the bit patterns of bfloat16 numbers (3.8 and 3.9), and
    orders the sum of the others by the row's place in the tile, as the BLAS behind numpy does. A
    product of two bfloat16 numbers is exact in float32.
    """
    if INTERPRETED:
        return tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    else:
        return tl.dot(a, b, input_precision="ieee")
