"""RMSNorm in Triton: squares, mean, root and scaling in float32, whatever the storage dtype.

A residual is added in float32 and not rounded before it is normed. The result is rounded once, or
twice with ``rounds_before_weight``; ``layerbisect.kernels.rms_norm`` says which engine does which.

The deterministic form gives each row to one program, which walks over it in fixed steps. The fast
form does so too where there are rows enough to fill a GPU. Where there are fewer, several programs
share a row and add up their sums of squares, how many depends on the number of rows, and so does
the order of the sum: a token that is decoded alone gets other bits than in a prefill.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layerbisect.kernels.triton_forms.common import Build, aligned, interpreting, narrowed

# about one program for each compute unit of a data-centre GPU: 132 in an H100, 256 in an MI355X
_PROGRAMS = 128
_MAX_PARTS = 8
_MIN_COLUMNS = 8
_STEP = 1024
# the order of a sum depends on the number of warps too
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _load(
    x: tl.tensor,
    residual: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
) -> tl.tensor:
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_squares(
    x: tl.tensor,
    residual: tl.tensor,
    row_start: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> tl.tensor:
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = _load(x, residual, row_start + column, column < last, HAS_RESIDUAL)
        squares += value * value
    return tl.sum(squares, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _store_scaled(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    row_start: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS_BEFORE_WEIGHT: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    dtype: tl.constexpr = y.dtype.element_ty
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < last
        value = _load(x, residual, row_start + column, inside, HAS_RESIDUAL) * scale
        if ROUNDS_BEFORE_WEIGHT:
            value = narrowed(value, dtype, INTERPRETED).to(tl.float32)
        value *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row_start + column, narrowed(value, dtype, INTERPRETED), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _whole_row(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    hidden: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS_BEFORE_WEIGHT: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row_start = tl.program_id(0).to(tl.int64) * hidden
    total = _sum_of_squares(x, residual, row_start, 0, hidden, BLOCK, HAS_RESIDUAL)
    _store_scaled(
        x,
        residual,
        weight,
        y,
        row_start,
        0,
        hidden,
        tl.rsqrt(total / hidden + eps),
        BLOCK,
        HAS_RESIDUAL,
        ROUNDS_BEFORE_WEIGHT,
        INTERPRETED,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _part_of_a_sum(
    x: tl.tensor,
    residual: tl.tensor,
    sums: tl.tensor,
    hidden: tl.tensor,
    span: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = part * span
    last = tl.minimum(first + span, hidden)
    total = _sum_of_squares(x, residual, row * hidden, first, last, BLOCK, HAS_RESIDUAL)
    tl.store(sums + row * PARTS + part, total)


@triton.jit  # type: ignore[untyped-decorator]
def _part_of_a_row(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    sums: tl.tensor,
    y: tl.tensor,
    hidden: tl.tensor,
    span: tl.tensor,
    eps: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS_BEFORE_WEIGHT: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.sum(tl.load(sums + row * PARTS + tl.arange(0, PARTS)), axis=0)
    first = part * span
    _store_scaled(
        x,
        residual,
        weight,
        y,
        row * hidden,
        first,
        tl.minimum(first + span, hidden),
        tl.rsqrt(total / hidden + eps),
        BLOCK,
        HAS_RESIDUAL,
        ROUNDS_BEFORE_WEIGHT,
        INTERPRETED,
    )


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    rounds_before_weight: bool = True,
    deterministic: bool,
) -> torch.Tensor:
    """Normalise ``x``, or ``x + residual``, over the last dimension.

    ``x`` [row, hidden] or [row, head, channel], bfloat16, float16 or float32; ``weight`` [hidden]
    or [channel]; ``residual`` of the shape of ``x``. Returns the shape and dtype of ``x``. Raises
    ValueError for shapes that don't fit.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must have shape {list(x.shape[-1:])}, got {list(weight.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have shape {list(x.shape)}, got {list(residual.shape)}")
    hidden = x.shape[-1]
    rows = x.numel() // max(hidden, 1)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, weight = aligned(x), aligned(weight)
    added = x if residual is None else aligned(residual)
    parts = 1 if deterministic else _parts(rows, hidden)
    span = triton.cdiv(hidden, parts)
    fixed = {
        "BLOCK": min(triton.next_power_of_2(span), _STEP),
        "HAS_RESIDUAL": residual is not None,
        "num_warps": _WARPS,
        "enable_fp_fusion": False,
    }
    rounding = {"ROUNDS_BEFORE_WEIGHT": rounds_before_weight, "INTERPRETED": interpreting()}
    if parts == 1:
        _whole_row[(rows,)](x, added, weight, y, hidden, eps, **fixed, **rounding)
        return y
    grid = (rows, parts)
    sums = torch.empty(grid, dtype=torch.float32, device=x.device)
    _part_of_a_sum[grid](x, added, sums, hidden, span, PARTS=parts, **fixed)
    _part_of_a_row[grid](
        x, added, weight, sums, y, hidden, span, eps, PARTS=parts, **fixed, **rounding
    )
    return y


def _parts(rows: int, hidden: int) -> int:
    """Return among how many programs the fast form shares a row: a power of two."""
    parts = _MAX_PARTS
    while parts > 1 and (rows * parts > _PROGRAMS or hidden < parts * _MIN_COLUMNS):
        parts //= 2
    return parts


def builds() -> list[Build]:
    """Return the kernels of a norm over 4096 channels in bfloat16, with a residual."""
    tensors = dict.fromkeys(("x", "residual", "weight", "y"), "*bf16")
    fixed = {"BLOCK": _STEP, "HAS_RESIDUAL": True}
    rounding = {"ROUNDS_BEFORE_WEIGHT": False, "INTERPRETED": False}
    split = {"sums": "*fp32", "hidden": "i32:16", "span": "i32:16"}
    part = {"PARTS": _MAX_PARTS, **fixed, "BLOCK": 4096 // _MAX_PARTS}
    return [
        Build(
            "rms_norm-whole_row",
            _whole_row,
            {**tensors, "hidden": "i32:16", "eps": "fp32"},
            {**fixed, **rounding},
            _WARPS,
        ),
        Build(
            "rms_norm-part_of_a_sum",
            _part_of_a_sum,
            {"x": "*bf16", "residual": "*bf16", **split},
            part,
            _WARPS,
        ),
        Build(
            "rms_norm-part_of_a_row",
            _part_of_a_row,
            {**tensors, **split, "eps": "fp32"},
            {**part, **rounding},
            _WARPS,
        ),
    ]
