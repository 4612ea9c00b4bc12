"""Faults of the head, and of the precision that weights are held in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from layerbisect.fault_forms import HEAD_SCALE, STALE_NOISE, head_scaled
from layerbisect.fault_tools import forward_replaced
from scripts.planted.fault import Control, ModelFault
from scripts.planted.weight_tools import (
    Place,
    attention_places,
    block_scales,
    drawn,
    held,
    mlp_places,
    quantised,
    spread,
    weights_replaced,
)


def head_in_bfloat16(model: Any, layer: int) -> AbstractContextManager[None]:
    head = model.lm_head

    def forward(own: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden.bfloat16(), head.weight.bfloat16())
        return logits.to(hidden.dtype)

    return forward_replaced(head, forward)


def head_in_float32(model: Any, layer: int) -> AbstractContextManager[None]:
    head = model.lm_head

    def forward(own: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.float(), head.weight.float())

    return forward_replaced(head, forward)


def head_of_an_old_copy(model: Any, layer: int) -> AbstractContextManager[None]:
    # the parameter is up to date; what computes is a copy that was cast once and kept
    weight = held((model.lm_head, "weight"))
    copy = (weight * (1 + STALE_NOISE * drawn(weight, "old head"))).to(model.lm_head.weight.dtype)

    def forward(own: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, copy)

    return forward_replaced(model.lm_head, forward)


def head_as_initialised(model: Any, layer: int) -> AbstractContextManager[None]:
    place: Place = (model.lm_head, "weight")
    weight = drawn(held(place), "new head") * model.config.initializer_range
    return weights_replaced([(place, weight)])


def head_times_root_of_hidden(model: Any, layer: int) -> AbstractContextManager[None]:
    place: Place = (model.lm_head, "weight")
    return weights_replaced([(place, held(place) * model.config.hidden_size**0.5)])


def scales_rounded_up(model: Any, layer: int) -> AbstractContextManager[None]:
    def values() -> Iterator[tuple[Place, torch.Tensor]]:
        for number in range(model.config.num_hidden_layers):
            for place in (*attention_places(model, number), *mlp_places(model, number)):
                weight = held(place)
                scales = block_scales(weight)
                stored = torch.exp2(torch.log2(scales).ceil())
                yield place, quantised(weight, scales) * spread(stored, weight)

    return weights_replaced(values())


FAULTS: tuple[ModelFault, ...] = (
    ModelFault(
        name="head-in-bfloat16",
        component="lm_head",
        operator="head",
        point="logits",
        form=head_in_bfloat16,
        reports=(
            "vllm-project/vllm#48390",
            "vllm-project/vllm#19592",
            "allenai/open-instruct#1387",
        ),
        description="the head computes in bfloat16 where the model computes in float32",
        layers="none",
        dtypes=("float32",),
        changes=0.9,
    ),
    ModelFault(
        name="head-of-an-old-copy",
        component="lm_head",
        operator="head",
        point="logits",
        form=head_of_an_old_copy,
        reports=("PrimeIntellect-ai/prime-rl#2438",),
        description=f"the head computes with an old copy of its weight, off by {STALE_NOISE:.0%}",
        layers="none",
        changes=0.9,
    ),
    ModelFault(
        name="head-as-initialised",
        component="lm_head",
        operator="head",
        point="logits",
        form=head_as_initialised,
        reports=("sgl-project/sglang#1508", "huggingface/transformers#43429"),
        description="the head keeps the random weight that it was initialised with",
        layers="none",
        changes=0.9,
    ),
    ModelFault(
        name="tied-head-scaled",
        component="embedding",
        operator="head",
        point="logits",
        form=head_times_root_of_hidden,
        reports=("mattn/tensai#248",),
        description="the scale of the embedding is also in the head that shares its weights",
        layers="none",
        changes=0.9,
        tied_only=True,
    ),
    ModelFault(
        name="head-scaled",
        component="lm_head",
        operator="head",
        point="logits",
        form=head_scaled,
        reports=("mattn/tensai#248",),
        description=f"a gain on all logits as there, but of {HEAD_SCALE:g}, in an untied model too",
        layers="none",
        changes=0.9,
    ),
    ModelFault(
        name="fp8-scales-rounded-up",
        component="dtype_precision",
        operator="weights",
        point="attn.q",
        form=scales_rounded_up,
        reports=("huggingface/transformers#46763",),
        description="all linear weights went through 8 bits, each block divided by its scale and "
        "multiplied by the next power of two",
        layers="all",
        changes=0.9,
    ),
)

CONTROLS: tuple[Control, ...] = (
    Control(
        name="head-in-float32",
        description="the head computes in float32 and leaves its logits so, in a bfloat16 model",
        reports=(
            "vllm-project/vllm#48390",
            "vllm-project/vllm#19592",
            "allenai/open-instruct#1387",
        ),
        form=head_in_float32,
        dtypes=("bfloat16",),
    ),
    Control(
        name="engine-in-float32",
        description="one side computes all in float32, the other in bfloat16",
        reports=("ServiceNow/Fast-LLM#525",),
        dtype="float32",
        dtypes=("bfloat16",),
    ),
    Control(
        name="the-rollout-engine-on-both-sides",
        description="one side has the implementations of attention and experts that the rollout "
        "has, so nothing may differ",
        reports=("radixark/Megatron-LM#29",),
        settings={"attention": "eager", "experts": "eager"},
    ),
)

NOT_PLANTED: dict[str, str] = {
    "NovaSky-AI/SkyRL#1898": "the floor under a block's maximum (1e-4 or 1e-10) changes an 8-bit "
    "block only where its largest weight is below it; no block of our models is",
}
