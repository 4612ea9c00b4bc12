"""Steps of a job on the real megatron-core: save what its ranks hold, as it is or with a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layerbisect.captures.megatron.weights import fingerprints, load_checkpoint
from layerbisect.captures.weights.snapshot import save_weights


def save(rank: Any, step: dict[str, Any]) -> dict[str, str]:
    """Load ``checkpoint`` over whatever is there, plant ``fault``, and save.

    Returns:
        the fingerprints of what this rank holds whole.
    """
    every = [p for chunk in rank.chunks for p in chunk.parameters()]
    before = {n: _copies(layer) for n, layer in _layers(rank).items()}
    with torch.no_grad():
        for parameter in every:
            parameter.fill_(torch.nan)
    load_checkpoint(rank.chunks, step["checkpoint"])
    assert not any(p.isnan().any() for p in every)
    # other ranks may hold nothing of the layer
    if "fault" in step and step["layer"] in before:
        layer = _layers(rank)[step["layer"]]
        with torch.no_grad():
            _FAULTS[step["fault"]](layer, before[step["layer"]])
    save_weights(
        rank.chunks,
        step["out"],
        vocab=step["vocab"],
        values=step.get("values", True),
        weight_version=step.get("version"),
    )
    return fingerprints(rank.chunks, vocab=step["vocab"])


def _layers(rank: Any) -> dict[int, Any]:
    found = [m for c in rank.chunks for m in c.modules() if hasattr(m, "self_attention")]
    return {layer.layer_number - 1: layer for layer in found}


def _copies(layer: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in layer.parameters()]


def _swap_experts(layer: Any, _: list[torch.Tensor]) -> None:
    if 0 not in layer.mlp.local_expert_indices:
        return
    first, second = layer.mlp.experts.local_experts[:2]
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        a.data, b.data = b.data, a.data


def _keep(layer: Any, before: list[torch.Tensor]) -> None:
    for parameter, value in zip(layer.parameters(), before, strict=True):
        parameter.copy_(value)


def _pack_in_turn(layer: Any, _: list[torch.Tensor]) -> None:
    # q, k and v one behind the other, as other engines have them
    weight, config = layer.self_attention.linear_qkv.weight, layer.config
    head = config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups * head
    packs = weight.unflatten(0, (-1, queries + 2 * head)).split([queries, head, head], 1)
    weight.copy_(torch.cat([pack.flatten(0, 1) for pack in packs]))


_FAULTS: dict[str, Callable[[Any, list[torch.Tensor]], None]] = {
    "swapped experts": _swap_experts,
    "stale layer": _keep,
    "not interleaved": _pack_in_turn,
}
