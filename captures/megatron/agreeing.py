"""What the ranks of a live tail tell each other; a capture has none of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerbisect.captures.megatron.model import Chunk


def reduced(values: Sequence[float], how: str, chunks: Sequence[Chunk]) -> list[float]:
    """Add numbers up over all ranks of the job (``SUM``), or take the least of each (``MIN``)."""
    import torch
    from torch import distributed

    if not distributed.is_initialized():
        return list(values)
    device = next(chunks[0].model.parameters()).device
    joint = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(joint, getattr(distributed.ReduceOp, how))
    total: list[float] = joint.tolist()
    return total


def gathered_fingerprints(mine: Mapping[str, str]) -> dict[str, str]:
    """Gather the weights' fingerprints over all ranks, the first rank's where they differ."""
    from torch import distributed

    if not distributed.is_initialized():
        return dict(mine)
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    found: dict[str, str] = {}
    for one in everyone:
        found = {**one, **found}
    return found
