"""Routed experts in Triton: rows sorted by expert, two grouped projections, a weighted sum.

    gate, up = x @ gate_up.T         rounded to the storage dtype
    inner = silu(gate) * up          in float32, rounded
    output = weight * inner @ down.T
    sum over slots                   in float32, rounded once

The deterministic form has one tile, whatever the number of rows, rounds each weighted output, and
adds them in the order of the slots or of the experts' numbers. The fast form chooses its tiles by
how many rows an expert has on average, cuts the sum of the down projection into splits where there
are too few tiles to fill a GPU, and adds everything to float32 totals in the order that programs
happen to arrive in: under the interpreter by expert, on a GPU another time in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from layerbisect.kernels.experts import require_routed
from layerbisect.kernels.triton_forms.combine import combine
from layerbisect.kernels.triton_forms.common import Build, aligned, dot, interpreting, narrowed
from layerbisect.kernels.triton_forms.permute import permute

# about as many programs as a GPU runs at once, one number so that bits don't depend on the device
_PROGRAMS = 128
_MOST_SPLITS = 4
# a split starts where 16 bytes of two-byte numbers do
_SPLIT_UNIT = 8


@dataclass(frozen=True, slots=True)
class _Tile:
    """Sizes of the tile that one program computes, and of the piece of the sum it does at once."""

    rows: int
    outs: int
    ins: int
    warps: int


_FIXED = _Tile(rows=32, outs=64, ins=64, warps=4)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    deterministic: bool,
    by_expert: bool = False,
) -> torch.Tensor:
    """Sum the routed experts of each row of ``x`` [row, hidden]: the same shape and dtype.

    ``ids`` int64 and ``weights`` [row, slot], where an ID of -1 marks an unused slot; ``gate_up``
    [expert, 2 * intermediate, hidden], gate above up, and ``down`` [expert, hidden, intermediate]
    of the dtype of ``x``: bfloat16, float16 or float32. The deterministic form adds up by slots, or
    ``by_expert`` in the order of the experts' numbers; the fast one in any order. Raises ValueError
    for shapes that don't fit, dtypes that differ and an expert that doesn't exist.
    """
    count, hidden, inner = down.shape if down.ndim == 3 else (0, 0, 0)
    if x.ndim != 2 or x.shape[1] != hidden or gate_up.shape != (count, 2 * inner, hidden):
        raise ValueError(
            "x, gate_up and down must have shapes [row, hidden], [expert, 2 * intermediate, hidden]"
            f" and [expert, hidden, intermediate], got {list(x.shape)}, {list(gate_up.shape)} and "
            f"{list(down.shape)}"
        )
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(
            "x, gate_up and down must have one dtype, "
            f"got {x.dtype}, {gate_up.dtype} and {down.dtype}"
        )
    require_routed(x, ids, weights, count)
    rows, slots = ids.shape
    if not ids.numel():
        return torch.zeros_like(x)
    tile = _FIXED if deterministic else _fast_tile(rows * slots / count)
    order, starts, expert, first = permute(ids, count, tile.rows)
    sizes = _constants(tile, x.dtype)
    places = order, starts, expert, first
    gated = x.new_empty(rows * slots, inner)
    _gate_up_kernel[(len(expert), triton.cdiv(inner, tile.outs))](
        aligned(x),
        aligned(gate_up),
        gated,
        *places,
        count,
        slots,
        hidden,
        inner,
        **sizes,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    grid = len(expert), triton.cdiv(hidden, tile.outs)
    splits = 1 if deterministic else _fast_splits(grid[0] * grid[1], inner, tile)
    if deterministic:
        outputs = x.new_empty(rows, slots, hidden)
    else:
        outputs = x.new_zeros(rows, hidden, dtype=torch.float32)
    _down_kernel[(*grid, splits)](
        gated,
        aligned(down),
        aligned(weights),
        outputs,
        *places,
        count,
        slots,
        hidden,
        inner,
        triton.cdiv(triton.cdiv(inner, splits), _SPLIT_UNIT) * _SPLIT_UNIT,
        **sizes,
        ADD=not deterministic,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    if not deterministic:
        return outputs.to(x.dtype)
    return combine(outputs, ids, deterministic=True, by_expert=by_expert)


def builds() -> list[Build]:
    """Return what to compile without a GPU."""
    places = {"order": "*i64", "starts": "*i64", "expert": "*i64", "first": "*i64"}
    sizes = {"count": "i32", "slots": "i32", "hidden": "i32:16", "inner": "i32:16"}
    made = []
    for name, tile, of, dtype in (
        ("deterministic", _FIXED, "*bf16", torch.bfloat16),
        ("deterministic float32", _FIXED, "*fp32", torch.float32),
        ("fast, 8 rows an expert", _fast_tile(8), "*bf16", torch.bfloat16),
        ("fast, 500 rows an expert", _fast_tile(500), "*bf16", torch.bfloat16),
    ):
        add = name.startswith("fast")
        constants = _constants(tile, dtype) | {"INTERPRETED": False}
        given = {"x": of, "gate_up": of, "gated": of}
        built = Build(
            f"experts gate_up, {name}",
            _gate_up_kernel,
            given | places | sizes,
            constants,
            tile.warps,
        )
        given = {"gated": of, "down": of, "weights": "*fp32", "y": "*fp32" if add else of}
        given |= places | sizes | {"span": "i32:16"}
        made += [
            built,
            Build(
                f"experts down, {name}", _down_kernel, given, constants | {"ADD": add}, tile.warps
            ),
        ]
    return made


def _fast_tile(rows: float) -> _Tile:
    if rows <= 16:
        return _Tile(rows=16, outs=64, ins=128, warps=4)
    if rows <= 64:
        return _Tile(rows=64, outs=64, ins=64, warps=4)
    return _Tile(rows=128, outs=128, ins=64, warps=8)


def _fast_splits(tiles: int, ins: int, tile: _Tile) -> int:
    return max(1, min(_PROGRAMS // tiles, _MOST_SPLITS, ins // tile.ins))


def _constants(tile: _Tile, dtype: torch.dtype) -> dict[str, int | bool]:
    # as many bytes at once in float32 as in the narrower dtypes: local memory is what limits a tile
    ins = tile.ins // 2 if dtype == torch.float32 else tile.ins
    return {"ROWS": tile.rows, "OUTS": tile.outs, "INS": ins, "INTERPRETED": interpreting()}


@triton.jit  # type: ignore[untyped-decorator]
def _project(
    x: tl.tensor,
    row: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """Multiply rows of ``x`` by columns of ``weight.T`` from ``begin`` to ``end``; row -1 is 0."""
    total = tl.zeros((ROWS, OUTS), tl.float32)
    for start in range(begin, end, INS):
        at = start + tl.arange(0, INS)
        here = at < end
        a = tl.load(
            x + row[:, None] * ins + at[None, :],
            mask=(row >= 0)[:, None] & here[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + out[None, :] * ins + at[:, None],
            mask=(out < outs)[None, :] & here[:, None],
            other=0.0,
        )
        total += dot(a, b, INTERPRETED)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up_kernel(
    x: tl.tensor,
    gate_up: tl.tensor,
    gated: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    slots: tl.tensor,
    hidden: tl.tensor,
    inner: tl.tensor,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """Compute a tile of ``gated`` [place, intermediate] from rows of ``x``."""
    mine = tl.load(expert + tl.program_id(0))
    if mine == count:
        return
    place = tl.load(first + tl.program_id(0)) + tl.arange(0, ROWS)
    real = place < tl.load(starts + mine + 1)
    row = tl.where(real, tl.load(order + place, mask=real, other=0) // slots, -1)
    out = tl.program_id(1).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    gate_w = gate_up + mine * 2 * inner * hidden
    up_w = gate_w + inner.to(tl.int64) * hidden
    stored = gated.dtype.element_ty
    z = _project(x, row, gate_w, out, inner, hidden, 0, hidden, ROWS, OUTS, INS, INTERPRETED)
    up = _project(x, row, up_w, out, inner, hidden, 0, hidden, ROWS, OUTS, INS, INTERPRETED)
    z = narrowed(z, stored, INTERPRETED).to(tl.float32)
    up = narrowed(up, stored, INTERPRETED).to(tl.float32)
    # exp(-z) would overflow where z is very negative
    decayed = tl.exp(-tl.abs(z))
    silu = tl.where(z < 0, z * decayed, z) / (1 + decayed)
    tl.store(
        gated + place[:, None] * inner + out[None, :],
        narrowed(silu * up, stored, INTERPRETED),
        mask=real[:, None] & (out < inner)[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _down_kernel(
    gated: tl.tensor,
    down: tl.tensor,
    weights: tl.tensor,
    y: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    slots: tl.tensor,
    hidden: tl.tensor,
    inner: tl.tensor,
    span: tl.tensor,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """Compute a tile of ``y`` [row, slot, hidden], or ``ADD`` a split's part to [row, hidden]."""
    mine = tl.load(expert + tl.program_id(0))
    if mine == count:
        return
    place = tl.load(first + tl.program_id(0)) + tl.arange(0, ROWS)
    real = place < tl.load(starts + mine + 1)
    slot = tl.load(order + place, mask=real, other=0)
    out = tl.program_id(1).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    begin = tl.program_id(2) * span
    end = tl.minimum(begin + span, inner)
    down += mine * hidden * inner
    place = tl.where(real, place, -1)
    total = _project(
        gated, place, down, out, hidden, inner, begin, end, ROWS, OUTS, INS, INTERPRETED
    )
    total *= tl.load(weights + slot, mask=real, other=0.0).to(tl.float32)[:, None]
    mask = real[:, None] & (out < hidden)[None, :]
    if ADD:
        at = (slot // slots)[:, None] * hidden + out[None, :]
        tl.atomic_add(y + at, total, mask=mask, sem="relaxed")
    else:
        at = slot[:, None] * hidden + out[None, :]
        tl.store(y + at, narrowed(total, y.dtype.element_ty, INTERPRETED), mask=mask)
