"""Linear projection in Triton: ``y = x @ weight.T + bias``, summed in float32 and rounded once.

The fast form cuts the sum over ``in`` into splits where rows and outputs make too few tiles to fill
a GPU (split-K), and chooses its tiles by the number of rows: a row's sum is ordered by what else is
in its batch. The deterministic form has one tile and one split, whatever the shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from layerbisect.kernels.triton_forms.common import (
    Build,
    aligned,
    dot,
    interpreting,
    narrowed,
    require_dtype,
)

# about as many programs as a GPU runs at once; part of what the fast form's bits depend on, so that
# it is one number and not asked of the device
_PROGRAMS = 128
_MOST_SPLITS = 8
# a split starts where 16 bytes of two-byte numbers do
_SPLIT_UNIT = 8
_SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class _Tile:
    """Sizes of the tile that one program computes, and of the piece of ``in`` it does at once."""

    rows: int
    outs: int
    ins: int
    warps: int


_FIXED = _Tile(rows=64, outs=64, ins=64, warps=4)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool,
    splits: int | None = None,
) -> torch.Tensor:
    """Project ``x`` [row, in] by ``weight`` [out, in] and ``bias`` [out] to [row, out].

    ``x`` and ``weight`` have one dtype, bfloat16, float16 or float32, and so has the result.
    ``splits`` is how many parts the sum over ``in`` is cut into; None leaves the choice to the
    form. Raises ValueError for shapes that don't fit and for dtypes that differ, and Unsupported
    for another dtype.
    """
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(
            "x and weight must have shapes [row, in] and [out, in], got "
            f"{list(x.shape)} and {list(weight.shape)}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x and weight must have one dtype, got {x.dtype} and {weight.dtype}")
    require_dtype("x", x)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {list(weight.shape[:1])}, got {list(bias.shape)}")
    if splits is not None and splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}")
    rows, ins = x.shape
    outs = len(weight)
    y = x.new_empty(rows, outs)
    if not y.numel():
        return y
    tile = _FIXED if deterministic else _fast_tile(rows)
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(outs, tile.outs)
    if splits is None:
        splits = 1 if deterministic else _fast_splits(grid[0] * grid[1], ins, tile)
    span = triton.cdiv(triton.cdiv(ins, splits), _SPLIT_UNIT) * _SPLIT_UNIT
    bias = None if bias is None else aligned(bias)
    parts = y if splits == 1 else y.new_empty(splits, rows, outs, dtype=torch.float32)
    _linear_kernel[(*grid, splits)](
        aligned(x),
        aligned(weight),
        bias if splits == 1 else None,
        parts,
        rows,
        outs,
        ins,
        span,
        **_constants(tile, x.dtype),
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    if splits > 1:
        _sum_kernel[(triton.cdiv(rows * outs, _SUM_BLOCK),)](
            parts,
            bias,
            y,
            rows * outs,
            outs,
            splits,
            BLOCK=_SUM_BLOCK,
            INTERPRETED=interpreting(),
            enable_fp_fusion=False,
        )
    return y


def builds() -> list[Build]:
    """Return what to compile without a GPU."""
    sizes = {"rows": "i32"} | dict.fromkeys(("outs", "ins", "span"), "i32:16")
    made = [
        Build(
            f"linear {name}",
            _linear_kernel,
            {"x": f"*{of}", "weight": f"*{of}", "bias": f"*{of}", "y": f"*{into}"} | sizes,
            _constants(tile, dtype) | {"INTERPRETED": False},
            tile.warps,
        )
        for name, tile, of, into, dtype in (
            ("deterministic", _FIXED, "bf16", "bf16", torch.bfloat16),
            ("deterministic float32", _FIXED, "fp32", "fp32", torch.float32),
            ("fast, 1 row", _fast_tile(1), "bf16", "fp32", torch.bfloat16),
            ("fast, 64 rows", _fast_tile(64), "bf16", "bf16", torch.bfloat16),
            ("fast, 1000 rows", _fast_tile(1000), "bf16", "bf16", torch.bfloat16),
        )
    ]
    tensors = {"parts": "*fp32", "bias": "*bf16", "y": "*bf16"}
    counts = {"count": "i32:16", "outs": "i32:16", "splits": "i32"}
    constants = {"BLOCK": _SUM_BLOCK, "INTERPRETED": False}
    return [*made, Build("linear sum of splits", _sum_kernel, tensors | counts, constants)]


def _fast_tile(rows: int) -> _Tile:
    if rows <= 16:
        return _Tile(rows=16, outs=64, ins=128, warps=4)
    if rows <= 64:
        return _Tile(rows=64, outs=64, ins=64, warps=4)
    return _Tile(rows=128, outs=128, ins=64, warps=8)


def _fast_splits(tiles: int, ins: int, tile: _Tile) -> int:
    """Return enough splits for ``_PROGRAMS`` programs, unless they would be too short."""
    # a split writes a partial sum for each row where it reads a weight for each of ``in``
    return max(1, min(_PROGRAMS // tiles, _MOST_SPLITS, -(-ins // tile.rows)))


def _constants(tile: _Tile, dtype: torch.dtype) -> dict[str, int | bool]:
    # as many bytes at once in float32 as in the narrower dtypes: local memory is what limits a tile
    ins = tile.ins // 2 if dtype == torch.float32 else tile.ins
    return {"ROWS": tile.rows, "OUTS": tile.outs, "INS": ins, "INTERPRETED": interpreting()}


# a row alone must not be compiled for itself
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    span: tl.tensor,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """Compute a tile of ``x @ weight.T + bias``, or of one split's part of it."""
    # a large batch's logits are more than 2^31 numbers
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    first = split * span
    last = tl.minimum(first + span, ins)
    total = tl.zeros((ROWS, OUTS), tl.float32)
    for start in range(first, last, INS):
        at = start + tl.arange(0, INS)
        here = at < last
        a = tl.load(
            x + row[:, None] * ins + at[None, :],
            mask=(row < rows)[:, None] & here[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + out[None, :] * ins + at[:, None],
            mask=(out < outs)[None, :] & here[:, None],
            other=0.0,
        )
        total += dot(a, b, INTERPRETED)
    if bias is not None:
        total += tl.load(bias + out, mask=out < outs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + (split.to(tl.int64) * rows + row)[:, None] * outs + out[None, :],
        narrowed(total, y.dtype.element_ty, INTERPRETED),
        mask=(row < rows)[:, None] & (out < outs)[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    count: tl.tensor,
    outs: tl.tensor,
    splits: tl.tensor,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """Sum the splits' parts in their order, add the bias and round."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    part = parts + at
    for _ in range(splits):
        total += tl.load(part, mask=at < count, other=0.0)
        part += count
    if bias is not None:
        total += tl.load(bias + at % outs, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y + at, narrowed(total, y.dtype.element_ty, INTERPRETED), mask=at < count)
