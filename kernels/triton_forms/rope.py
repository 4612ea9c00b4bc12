"""Rotary position embedding in Triton: angle, cosine, sine and products in float32, rounded once.

The angle is the float32 product of position and frequency, as in transformers, SGLang and
megatron-core, so that it errs as theirs does: by half a unit in the last place, 0.03 radians of
half a million. From there on nothing is lost: cosine and sine are those of the compiler's device
library, which reduces arguments of any size exactly, and no hardware approximation.

Every element is computed by itself, so there is no order of reduction to choose: the fast and the
deterministic form are one kernel and give the same bits. They differ only in how many heads a
program takes, which the fast form chooses by the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layerbisect.kernels.triton_forms.common import Build, interpreting, narrowed

_HEADS = 4
_MAX_HEADS = 16
# about one program for each compute unit of a data-centre GPU
_PROGRAMS = 128


@triton.jit  # type: ignore[untyped-decorator]
def _rope(
    x: tl.tensor,
    position: tl.tensor,
    inv_freq: tl.tensor,
    y: tl.tensor,
    heads: tl.tensor,
    half: tl.tensor,
    scaling: tl.tensor,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    frequency = tl.load(inv_freq + pair, mask=pair < half, other=0.0).to(tl.float32)
    angle = tl.load(position + row).to(tl.float32) * frequency
    cos = (tl.cos(angle) * scaling)[None, :]
    sin = (tl.sin(angle) * scaling)[None, :]
    start = ((row * heads + head) * 2 * half)[:, None]
    if INTERLEAVED:
        at_first = start + 2 * pair[None, :]
        at_second = at_first + 1
    else:
        at_first = start + pair[None, :]
        at_second = at_first + half
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    first = tl.load(x + at_first, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at_second, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = y.dtype.element_ty
    turned = narrowed(first * cos - second * sin, dtype, INTERPRETED)
    tl.store(y + at_first, turned, mask=inside)
    turned = narrowed(second * cos + first * sin, dtype, INTERPRETED)
    tl.store(y + at_second, turned, mask=inside)


def rope(
    x: torch.Tensor,
    position: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
    deterministic: bool,
) -> torch.Tensor:
    """Turn ``x`` [row, head, channel], bfloat16, float16 or float32, by the positions of its rows.

    ``position`` is int64 [row], ``inv_freq`` float32 [channel / 2]. Returns the shape and dtype of
    ``x``. Raises ValueError when the shapes don't fit.
    """
    half = len(inv_freq)
    if x.ndim != 3 or x.shape[-1] != 2 * half:
        raise ValueError(f"x must have shape [row, head, {2 * half}], got {list(x.shape)}")
    if position.shape != x.shape[:1]:
        raise ValueError(f"position must have shape [{len(x)}], got {list(position.shape)}")
    rows, heads, _ = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    taken = _HEADS if deterministic else _heads(rows, heads)
    _rope[(rows, triton.cdiv(heads, taken))](
        x.contiguous(),
        position.contiguous(),
        inv_freq.contiguous(),
        y,
        heads,
        half,
        float(attention_scaling),
        HEADS=taken,
        BLOCK=triton.next_power_of_2(half),
        INTERLEAVED=interleaved,
        INTERPRETED=interpreting(),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y


def _heads(rows: int, heads: int) -> int:
    """Return how many heads a program of the fast form takes: a power of two."""
    taken = min(triton.next_power_of_2(heads), _MAX_HEADS)
    while taken > 1 and rows * triton.cdiv(heads, taken) < _PROGRAMS:
        taken //= 2
    return int(taken)


def builds() -> list[Build]:
    """Return both styles over heads of 128 channels in bfloat16."""
    signature = {
        "x": "*bf16",
        "position": "*i64",
        "inv_freq": "*fp32",
        "y": "*bf16",
        "heads": "i32:16",
        "half": "i32:16",
        "scaling": "fp32",
    }
    fixed = {"HEADS": _MAX_HEADS, "BLOCK": 64, "INTERPRETED": False}
    return [
        Build(f"rope-{style}", _rope, signature, {**fixed, "INTERLEAVED": style == "interleaved"})
        for style in ("half", "interleaved")
    ]
