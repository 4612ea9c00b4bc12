"""Whether one tensor holds another's rows in a different order, and which order that is.

Rows are compared by a sketch, their products with a few random vectors, [row, 8] in float64: the
distance of two sketches is that of the tensors, but for chance of a few per cent, and equal rows
have equal sketches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

WIDTH = 8
_CHUNK = 4096
# what a known order may leave of the difference: rounding or an update lie on top
_KNOWN = 0.5
_CANCELS = 0.3
_SHARDS = (2, 4, 8)
_HEADS = (256, 192, 128, 96, 80, 64, 32, 16)


@dataclass(frozen=True, slots=True)
class Order:
    """How the rows (or columns) are ordered; ``exact`` where all are equal then."""

    how: str
    exact: bool


def sketch(values: torch.Tensor) -> torch.Tensor:
    """Multiply rows of [row, column] by ``WIDTH`` random vectors that depend on the width alone."""
    draw = torch.Generator().manual_seed(0)
    vectors = torch.randn(values.shape[1], WIDTH, generator=draw, dtype=torch.float64)
    chunks = [values[at : at + _CHUNK].double() @ vectors for at in range(0, len(values), _CHUNK)]
    return torch.cat(chunks)


def find_order(
    first: torch.Tensor,
    second: torch.Tensor,
    parts: Mapping[str, int] | None = None,
    what: str = "rows",
) -> Order | None:
    """Say in which order ``first`` [row, k] has the sketched rows of ``second``; None if in none.

    ``parts`` are the heights of matrices that lie below one another in both, as q, k and v; then
    only orders of packing are tried.
    """
    apart = float(torch.linalg.vector_norm(first - second))
    if not apart or not torch.isfinite(first).all() or not torch.isfinite(second).all():
        return None
    count = len(first)
    best: tuple[float, str] | None = None
    for name, order in _known(count, parts or {}, what):
        for said, moved in ((name, second[order]), (f"{name}, undone", second[_inverse(order)])):
            left = float(torch.linalg.vector_norm(first - moved)) / apart
            if left < (best[0] if best else _KNOWN):
                best = (left, said)
    if best is not None:
        return Order(best[1], best[0] < 1e-6)
    return None if parts else _any_order(first, second, what)


def _any_order(first: torch.Tensor, second: torch.Tensor, what: str) -> Order | None:
    mine, theirs = first[:, 0].argsort(stable=True), second[:, 0].argsort(stable=True)
    scale = float(second.abs().max())
    if not torch.allclose(first[mine], second[theirs], rtol=0, atol=1e-9 * scale):
        return None
    order = torch.empty_like(theirs)
    order[mine] = theirs
    places = torch.arange(len(order))
    moved = int((order != places).sum())
    for block in sorted(_HEADS):
        if len(order) % block or len(order) == block:
            continue
        blocks = order.view(-1, block)
        steps = torch.arange(block)
        if bool((blocks == blocks[:, :1] + steps).all()):
            heads = int((blocks[:, 0] != places.view(-1, block)[:, 0]).sum())
            return Order(f"{heads} of {len(blocks)} blocks of {block} {what} moved", True)
    return Order(f"{moved} of {len(order)} {what} moved", True)


def packing_that_cancels(difference: torch.Tensor, parts: Mapping[str, int]) -> str | None:
    """Say in which order of packing a sketched difference [row, k] of two sides cancels.

    Where one side has an update's rows in another order, and what was updated is the same, the
    difference sums to nothing over each cycle of that order: what a row lost another has.
    """
    whole = float(torch.linalg.vector_norm(difference))
    # the fewest shards first: over longer cycles more cancels
    for name, cycles in _packings(tuple(parts.items())):
        sums = torch.zeros_like(difference).index_add_(0, cycles, difference)
        if float(torch.linalg.vector_norm(sums)) < _CANCELS * whole:
            return name
    return None


@lru_cache(maxsize=8)
def _packings(parts: tuple[tuple[str, int], ...]) -> tuple[tuple[str, torch.Tensor], ...]:
    # every expert is packed alike
    heights = dict(parts)
    known = _known(sum(heights.values()), heights, "rows")
    return tuple((name, _cycles(order)) for name, order in known)


def _cycles(order: torch.Tensor) -> torch.Tensor:
    """Label each place with the smallest place of its cycle."""
    label = torch.full_like(order, -1)
    follow: list[int] = order.tolist()
    for start in range(len(follow)):
        place = start
        while label[place] < 0:
            label[place] = start
            place = follow[place]
    return label


def _known(count: int, parts: Mapping[str, int], what: str) -> Iterator[tuple[str, torch.Tensor]]:
    places = torch.arange(count)
    if len(parts) > 1:
        for ranks in (1, *_SHARDS):
            for shards in _SHARDS:
                if all(part % (ranks * shards) == 0 for part in parts.values()):
                    packed = " ".join(f"{p[0]}{r}" for r in range(shards) for p in parts)
                    where = f" in each of {ranks} shards" if ranks > 1 else ""
                    yield f"packed by shard, [{packed}]{where}", _packed(parts, shards, ranks)
        return
    if count % 2 == 0:
        yield f"halves of the {what} interleaved", places.view(2, -1).T.reshape(-1)
    for width in _HEADS:
        if count % width == 0 and count > width:
            inner = torch.arange(width).view(2, -1).T.reshape(-1)
            yield (
                f"halves of each {width} {what} interleaved, as for another rotary embedding",
                (places.view(-1, width)[:, :1] + inner).reshape(-1),
            )
    for shards in _SHARDS:
        if count % shards == 0 and count > shards:
            blocks = places.view(shards, -1)
            yield f"{shards} shards of the {what} in reverse", blocks.flip(0).reshape(-1)


def _packed(parts: Mapping[str, int], shards: int, ranks: int) -> torch.Tensor:
    """Order matrices below one another as each of ``ranks`` packs its own rows of them by shard."""
    made = torch.arange(sum(parts.values()))
    split = [piece.chunk(ranks) for piece in made.split(list(parts.values()))]
    for own in [list(of_rank) for of_rank in zip(*split, strict=True)]:
        chunks = [piece.chunk(shards) for piece in own]
        order = torch.cat([piece for shard in zip(*chunks, strict=True) for piece in shard])
        made[torch.cat(own)] = order.clone()
    return made


def _inverse(order: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(order)
    made[order] = torch.arange(len(order))
    return made
