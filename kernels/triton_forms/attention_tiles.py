"""What the Triton forms of attention share: tiles, and what a tile of keys does to a softmax.

With a running maximum and denominator (Dao et al. 2022, arXiv:2205.14135). Probabilities are
rounded to the storage dtype before they meet the values; everything else is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layerbisect.kernels.replay.implementation import Unsupported
from layerbisect.kernels.triton_forms.common import dot, narrowed

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_CHANNELS = 256
# bytes of one tile of keys: those of keys and values must fit into 64 KiB together
TILE_BYTES = 16 * 2**10


def check_supported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise Unsupported for dtypes and sizes that the kernels have no tiles for."""
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise Unsupported(
            "q, k and v must all be bfloat16, float16 or float32, got "
            f"{q.dtype}, {k.dtype}, {v.dtype}"
        )
    if q.shape[2] > MOST_CHANNELS:
        raise Unsupported(f"a head can have {MOST_CHANNELS} channels, got {q.shape[2]}")


def width(channels: int) -> int:
    """Channels of a tile: a power of two that a dot takes."""
    return max(16, int(triton.next_power_of_2(channels)))


def tiles(q: torch.Tensor, queries: int, deterministic: bool) -> tuple[int, int]:
    """Return how many queries and keys a program takes at once.

    In the fast form they depend on the longest sequence's ``queries``; in the deterministic one on
    the model alone: its channels and dtype.
    """
    keys = max(16, min(64, TILE_BYTES // (width(q.shape[2]) * q.element_size())))
    if deterministic or 16 < queries <= 128:
        return 64, keys
    if queries <= 16:
        return 16, keys
    # of the widest heads there is no room for more
    return (128, keys // 2) if keys > 16 else (64, keys)


def warps(rows: int) -> int:
    """Return how many warps share a tile of so many queries."""
    return 8 if rows > 64 else 4


@triton.jit  # type: ignore[untyped-decorator]
def attended(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    context: tl.tensor,
    INTERPRETED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take a tile of keys into the running softmax.

    q [row, channel], k [channel, key], v [key, channel], seen [row or 1, key], top and total [row],
    context [row, channel].
    """
    scores = dot(q, k, INTERPRETED) * scale
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # where nothing is seen so far, -inf less -inf would be no number
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(top - base)
    total = total * kept + tl.sum(weights, 1)
    weights = narrowed(weights, v.dtype, INTERPRETED)
    context = context * kept[:, None] + dot(weights, v, INTERPRETED)
    return higher, total, context


@triton.jit  # type: ignore[untyped-decorator]
def divided(
    top: tl.tensor, total: tl.tensor, context: tl.tensor, sinks: tl.tensor, head: tl.tensor
) -> tl.tensor:
    """Divide by the denominator, which the sinks of heads [row] are part of; an empty row is 0."""
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        base = tl.maximum(top, sink)
        base = tl.where(base == float("-inf"), 0.0, base)
        kept = tl.exp2(top - base)
        total = total * kept + tl.exp2(sink - base)
        context = context * kept[:, None]
    return context / tl.where(total == 0, 1.0, total)[:, None]
