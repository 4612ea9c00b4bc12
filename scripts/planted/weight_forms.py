"""How stale, undelivered and wrongly converted weights are put into a model's memory.

A capture's fingerprints show them, as they would those of a real engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from layerbisect.captures.errors import LayerBisectError
from scripts.planted.fault import Form
from scripts.planted.weight_tools import (
    Place,
    all_places,
    attention_places,
    block_scales,
    drawn,
    held,
    low_rank,
    mlp_places,
    quantised,
    spread,
    weights_replaced,
)

LORA_SHARE = 0.05
"""Norm of a LoRA update over that of its weight; the reports' grow over training."""
ONE_STEP = 1e-3
"""Relative change of weights over a step of training."""
GARBAGE = 1e4

Values = Iterator[tuple[Place, torch.Tensor]]


def _layers(model: Any) -> range:
    return range(model.config.num_hidden_layers)


def stale(noise: float) -> Form:
    def form(model: Any, layer: int) -> AbstractContextManager[None]:
        def values() -> Values:
            for number, place in enumerate(all_places(model)):
                weight = held(place)
                # a head that shares the embedding's weights is as stale as it
                seed = "embedding" if number == 0 or place[0] is model.lm_head else str(number)
                yield place, weight * (1 + noise * drawn(weight, seed))

        return weights_replaced(values())

    return form


def without_lora(attention: str, *, mlp: bool) -> Form:
    """Make a form in which what LoRA trained in these projections is not in the weights."""

    def form(model: Any, layer: int) -> AbstractContextManager[None]:
        def values() -> Values:
            for number in _layers(model):
                places = attention_places(model, number, attention)
                places += mlp_places(model, number) if mlp else []
                for index, place in enumerate(places):
                    weight = held(place)
                    yield place, weight - low_rank(weight, f"{number}/{index}", LORA_SHARE)

        return weights_replaced(values())

    return form


def lora_gate_up_interleaved(model: Any, layer: int) -> AbstractContextManager[None]:
    def values() -> Values:
        for number in _layers(model):
            places = mlp_places(model, number)[:-1]
            whole = torch.cat([held(place) for place in places], -2)
            right = low_rank(whole, str(number), LORA_SHARE)
            gate, up = (half.chunk(2, -2) for half in right.chunk(2, -2))
            # two ranks wrote what each has of both, and it is read as all of gate, then all of up
            wrong = torch.cat((gate[0], up[0], gate[1], up[1]), -2)
            yield from zip(places, (whole - right + wrong).chunk(len(places), -2), strict=True)

    return weights_replaced(values())


def _qkv_interleaved(model: Any, layer: int) -> list[tuple[Place, torch.Tensor]]:
    """Weights of one layer, fused as all of q, k and v and read as one rank after the other."""
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    ranks = next((n for n in range(2, kv_heads + 1) if not (kv_heads % n or heads % n)), None)
    if ranks is None:
        raise LayerBisectError(f"{heads} heads and {kv_heads} KV heads are of no two ranks")
    places = attention_places(model, layer, "qkv")
    weights = [held(place) for place in places]
    sizes = [len(weight) // ranks for weight in weights] * ranks
    pieces = torch.cat(weights).split(sizes)
    return [(place, torch.cat(pieces[part::3])) for part, place in enumerate(places)]


def qkv_interleaved(model: Any, layer: int) -> AbstractContextManager[None]:
    return weights_replaced(_qkv_interleaved(model, layer))


def every_qkv_interleaved(model: Any, layer: int) -> AbstractContextManager[None]:
    return weights_replaced(one for i in _layers(model) for one in _qkv_interleaved(model, i))


def o_proj_heads_swapped(model: Any, layer: int) -> AbstractContextManager[None]:
    if model.config.num_attention_heads < 2:
        raise LayerBisectError("swaps two heads; the model has one")
    (place,) = attention_places(model, layer, "o")
    size = model.model.layers[layer].self_attn.head_dim
    first, second, *rest = held(place).split(size, -1)
    return weights_replaced([(place, torch.cat((second, first, *rest), -1))])


def k_norm_uninitialised(model: Any, layer: int) -> AbstractContextManager[None]:
    attention = model.model.layers[layer].self_attn
    if not hasattr(attention, "k_norm"):
        raise LayerBisectError("needs a model with q/k norms")
    return _garbage((attention.k_norm, "weight"))


def norm_uninitialised(model: Any, layer: int) -> AbstractContextManager[None]:
    return _garbage((model.model.layers[layer].post_attention_layernorm, "weight"))


def _garbage(place: Place) -> AbstractContextManager[None]:
    return weights_replaced([(place, torch.full_like(held(place), GARBAGE))])


def scales_transposed(model: Any, layer: int) -> AbstractContextManager[None]:
    def values() -> Values:
        for place in mlp_places(model, layer):
            weight = held(place)
            scales = block_scales(weight)
            # written column by column and read row by row: as many numbers, in other places
            read = scales.mT.reshape(scales.shape)
            yield place, quantised(weight, scales) * spread(read, weight)

    return weights_replaced(values())
