"""Rows sorted by expert, and cut into the tiles that grouped projections compute."""

from __future__ import annotations

import torch


def permute(
    ids: torch.Tensor, count: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the slots of all rows by expert, and cut each expert's into tiles.

    Returns the flat slots in their new order, where each expert's start in it [expert + 1], and
    each tile's expert and first place. There are as many tiles as there could be, so that nothing
    waits for a GPU to count them: the expert of one that isn't needed is ``count``.
    """
    by_expert, order = torch.sort(ids.flatten(), stable=True)
    starts = torch.searchsorted(
        by_expert, torch.arange(count + 1, dtype=ids.dtype, device=ids.device)
    )
    tiles = (starts.diff() + tile - 1) // tile
    upto = tiles.cumsum(0)
    most = min(len(order), -(-len(order) // tile) + count)
    at = torch.arange(most, device=ids.device)
    expert = torch.searchsorted(upto, at, right=True)
    before = (upto - tiles)[expert.clamp_max(count - 1)]
    return order, starts, expert, starts[expert] + (at - before) * tile
