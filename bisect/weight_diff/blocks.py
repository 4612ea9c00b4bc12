"""Block-scaled weights: what rounding to FP8 explains, and how scales go wrong.

A block-scaled tensor holds ``values`` in FP8 and one scale a block; their product is the weight.
E4M3 has 3 bits of mantissa and a smallest step of 2^-9, E5M2 2 bits and 2^-16 (Micikevicius et al.
2022, "FP8 formats for deep learning"), so a product is within half a step of what was quantised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerbisect.bisect.weight_diff.holders import Held
from layerbisect.captures.errors import LayerBisectError

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_MANTISSA = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
_SMALLEST = {torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}
# a block's largest code is the largest that there is, or half of it for power-of-two scales
_UNUSED = 1 / 8
_LEFT = 0.5


@dataclass(frozen=True, slots=True)
class BlockFault:
    """What is wrong with scales, and on which side: 0, 1, or None where that cannot be told."""

    how: str
    side: int | None
    evidence: str


def within_rounding(first: Held, second: Held, numbers: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether two tensors differ by no more than quantising with proper scales makes.

    At least one is block-scaled. ``numbers`` are their dequantised values.
    """
    mine, theirs = numbers
    bound = torch.zeros_like(mine)
    larger = torch.maximum(mine.abs(), theirs.abs())
    for held in (first, second):
        if held.scale is None:
            bound += larger * (torch.finfo(held.values.dtype).eps / 2)
            continue
        kind = held.values.dtype
        if kind not in _LARGEST:
            raise LayerBisectError(f"scaled blocks of {kind} are not supported")
        # not the scale that it has, which may be the fault: twice the smallest that would do
        smallest = 2 * _by_block(larger, held, "amax") / _LARGEST[kind] * _SMALLEST[kind]
        bound += larger * _MANTISSA[kind] + _spread(smallest, held)
    return bool(((mine - theirs).abs() <= bound * 1.01).all())


def scale_fault(
    first: Held, second: Held, numbers: tuple[torch.Tensor, torch.Tensor]
) -> BlockFault | None:
    """Say how scales of blocks explain a difference; None where they do not."""
    holders = (first, second)
    scaled = [side for side, held in enumerate(holders) if held.scale is not None]
    for side in scaled:
        floor = _floored(holders[side], numbers, side)
        if floor is not None:
            return floor
    grid = holders[scaled[0]]
    if any(holders[s].block != grid.block for s in scaled):
        return None
    mine, theirs = numbers
    products = _by_block(mine * theirs, grid, "sum")
    squares = _by_block(theirs * theirs, grid, "sum")
    ratio = products / squares.clamp_min(1e-30)
    left = torch.linalg.vector_norm(mine - _spread(ratio, grid) * theirs)
    if ratio.numel() < 2 or float(left) > _LEFT * float(torch.linalg.vector_norm(mine - theirs)):
        return None
    return _ratios(ratio, holders, scaled)


def _ratios(
    ratio: torch.Tensor, holders: tuple[Held, Held], scaled: list[int]
) -> BlockFault | None:
    low, high = float(ratio.min()), float(ratio.max())
    if low <= 0 or high / low < 1.05:
        # one gain for all is no matter of blocks
        return None
    side = scaled[0] if len(scaled) == 1 else None
    said = f"the ratio of the sides is constant by block, from {low:.3g} to {high:.3g}"
    for each in scaled:
        scale = holders[each].scale
        assert scale is not None
        held = scale.float()
        if held.shape[0] == held.shape[1]:
            crossed = held / held.T
            wanted = crossed if each == 0 else 1 / crossed
            if torch.allclose(ratio.log(), wanted.log(), atol=0.1):
                return BlockFault(
                    "the scales of blocks are transposed", side if side is not None else each, said
                )
    over = ratio if side != 1 else 1 / ratio
    exponents = over.log2()
    if side is not None:
        scale = holders[side].scale
        assert scale is not None
        rounded = bool((scale.float().log2() % 1 == 0).all())
        if rounded and 0.95 <= float(over.min()) and float(over.max()) < 2.1:
            return BlockFault(
                "scales were rounded up to powers of two after quantising with others", side, said
            )
    if float((exponents - exponents.round()).abs().max()) < 0.03:
        return BlockFault("scales of blocks have other exponents", side, said)
    return BlockFault("scales of blocks are not those of the values", side, said)


def _floored(
    held: Held, numbers: tuple[torch.Tensor, torch.Tensor], side: int
) -> BlockFault | None:
    """Blocks that use a small part of the codes, all with one scale: it was not let be smaller."""
    assert held.scale is not None
    kind = held.values.dtype
    if kind not in _LARGEST:
        return None
    codes = _by_block(held.values.float().abs(), held, "amax")
    coarse = (codes < _UNUSED * _LARGEST[kind]) & (codes > 0)
    if not coarse.any():
        return None
    floor = float(held.scale.float()[coarse].min())
    same = held.scale.float()[coarse] == floor
    if not same.all() or floor > float(held.scale.float().min()) * 1.0001:
        return None
    # all that rounding does not explain must lie in these blocks
    mine, theirs = numbers
    off = (mine - theirs).abs()
    inside = _spread(coarse.float(), held) > 0
    larger = torch.maximum(mine.abs(), theirs.abs())
    if not bool((off <= 2.2 * _MANTISSA[kind] * larger)[~inside].all()):
        return None
    return BlockFault(
        f"scales of blocks are kept from falling below {floor:.3g}",
        side,
        f"{int(coarse.sum())} of {coarse.numel()} blocks share the smallest scale and use codes "
        f"up to {float(codes[coarse].max()):.3g} of {_LARGEST[kind]:g} alone",
    )


def _by_block(values: torch.Tensor, held: Held, how: str) -> torch.Tensor:
    """Reduce [out, in] over blocks, to [ceil(out / block), ceil(in / block)]."""
    height, width = held.block
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % width, 0, -rows % height))
    split = padded.reshape(len(padded) // height, height, -1, width)
    return split.abs().amax((1, 3)) if how == "amax" else split.sum((1, 3))


def _spread(blocks: torch.Tensor, held: Held) -> torch.Tensor:
    return Held(held.values, blocks, held.block).spread()
