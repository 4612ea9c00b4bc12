"""The sum of experts' weighted outputs in Triton, in float32 and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layerbisect.kernels.triton_forms.common import Build, aligned, interpreting, narrowed

_BLOCK = 256
# fewer rows leave a GPU idle
_MANY_ROWS = 128


def combine(
    outputs: torch.Tensor, ids: torch.Tensor, *, deterministic: bool, by_expert: bool = False
) -> torch.Tensor:
    """Add up weighted ``outputs`` [row, slot, hidden] in float32 and round once: [row, hidden].

    Slots with an ID of -1 in ``ids`` [row, slot] are left out. In the order of the slots, or
    ``by_expert`` in that of the experts' numbers; the fast form keeps two totals where there are
    few rows, of every other slot each. Raises ValueError for shapes that don't fit.
    """
    if outputs.ndim != 3 or outputs.shape[:2] != ids.shape:
        raise ValueError(
            "outputs and ids must have shapes [row, slot, hidden] and [row, slot], "
            f"got {list(outputs.shape)} and {list(ids.shape)}"
        )
    rows, slots, hidden = outputs.shape
    y = outputs.new_empty(rows, hidden)
    if not y.numel():
        return y
    _combine_kernel[(rows, triton.cdiv(hidden, _BLOCK))](
        aligned(outputs),
        aligned(ids),
        torch.argsort(ids, dim=1, stable=True) if by_expert else None,
        y,
        slots,
        hidden,
        PARTS=1 if deterministic or rows >= _MANY_ROWS else 2,
        BLOCK=_BLOCK,
        INTERPRETED=interpreting(),
        enable_fp_fusion=False,
    )
    return y


def builds() -> list[Build]:
    """Return what to compile without a GPU."""
    tensors = {"outputs": "*bf16", "ids": "*i64", "turns": "*i64", "y": "*bf16"}
    sizes = {"slots": "i32", "hidden": "i32:16"}
    constants = {"BLOCK": _BLOCK, "INTERPRETED": False}
    return [
        Build("combine by expert", _combine_kernel, tensors | sizes, constants | {"PARTS": 1}),
        Build(
            "combine, fast, few rows", _combine_kernel, tensors | sizes, constants | {"PARTS": 2}
        ),
    ]


@triton.jit  # type: ignore[untyped-decorator]
def _combine_kernel(
    outputs: tl.tensor,
    ids: tl.tensor,
    turns: tl.tensor,
    y: tl.tensor,
    slots: tl.tensor,
    hidden: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """Add up a block of one row, whose slots come in the order of ``turns``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        some = tl.zeros((BLOCK,), tl.float32)
        for turn in range(part, slots, PARTS):
            slot = row * slots + turn
            if turns is not None:
                slot = row * slots + tl.load(turns + slot)
            used = tl.load(ids + slot) >= 0
            at = outputs + slot * hidden + column
            some += tl.load(at, mask=used & (column < hidden), other=0.0).to(tl.float32)
        total += some
    stored = narrowed(total, y.dtype.element_ty, INTERPRETED)
    tl.store(y + row * hidden + column, stored, mask=column < hidden)
