"""Faults in the router's logits, and in the weights of the experts that it chose."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from layerbisect.fault_forms import router_low_precision, top_k_not_renormalised
from layerbisect.fault_tools import forward_replaced, parameter_replaced
from scripts.planted.fault import Control, ModelFault
from scripts.planted.routing_forms import (
    in_other_order,
    probabilities,
    rerouted,
    sparse_mlp,
    weights_for,
)

FOUR_BIT_GROUP = 32
"""So many of a router's input channels share a scale, as in quantised checkpoints."""
SCALING = 2.5
"""The routed scaling factor of the models that have one."""


def input_normed_again(model: Any, layer: int) -> AbstractContextManager[None]:
    norm = model.model.layers[layer].post_attention_layernorm

    def forward(own: Any, hidden: Any) -> Any:
        return own(_unit(norm, hidden).to(hidden.dtype))

    return forward_replaced(sparse_mlp(model, layer).gate, forward)


def input_norm_weight_twice(model: Any, layer: int) -> AbstractContextManager[None]:
    norm = model.model.layers[layer].post_attention_layernorm

    def forward(own: Any, hidden: Any) -> Any:
        return own(norm.weight * _unit(norm, hidden).to(hidden.dtype))

    return forward_replaced(sparse_mlp(model, layer).gate, forward)


def _unit(norm: Any, hidden: Any) -> Any:
    wide = hidden.float()
    return wide * (wide.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()


def in_bfloat16(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    gate = sparse_mlp(model, layer).gate

    def forward(own: Any, hidden: Any) -> Any:
        logits = torch.nn.functional.linear(hidden.bfloat16(), gate.weight.bfloat16())
        ids = probabilities(logits).topk(gate.top_k, -1)[1]
        weights = weights_for(gate, probabilities(logits), ids, hidden.dtype)
        return logits.to(hidden.dtype), weights, ids

    return forward_replaced(gate, forward)


def in_float32(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    gate = sparse_mlp(model, layer).gate

    def forward(own: Any, hidden: Any) -> Any:
        logits = torch.nn.functional.linear(hidden.float(), gate.weight.float())
        ids = probabilities(logits).topk(gate.top_k, -1)[1]
        return logits, weights_for(gate, probabilities(logits), ids, torch.float32), ids

    return forward_replaced(gate, forward)


def chosen_before_rounding(model: Any, layer: int) -> AbstractContextManager[None]:
    gate = sparse_mlp(model, layer).gate

    def forward(own: Any, hidden: Any) -> Any:
        logits = own(hidden)[0]
        # what the logits are before they are rounded: a near tie may fall to the other expert
        exact = hidden.double() @ gate.weight.double().T
        ids = exact.topk(gate.top_k, -1)[1]
        return logits, weights_for(gate, probabilities(logits), ids, logits.dtype), ids

    return forward_replaced(gate, forward)


def weight_in_4_bits(model: Any, layer: int) -> AbstractContextManager[None]:
    weight = sparse_mlp(model, layer).gate.weight.detach()
    groups = weight.float().unflatten(-1, (-1, min(FOUR_BIT_GROUP, weight.shape[-1])))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
    coarse = ((groups / scale).round() * scale).flatten(-2)
    return parameter_replaced(sparse_mlp(model, layer).gate, "weight", coarse.to(weight.dtype))


def gradient_detached(model: Any, layer: int) -> AbstractContextManager[None]:
    return rerouted(model, layer, lambda gate, logits, weights, ids: (weights.detach(), ids))


def _bfloat16_weights(gate: Any, logits: Any, ids: Any) -> Any:
    import torch

    scores = logits.bfloat16().softmax(-1)
    return weights_for(gate, scores, ids, torch.bfloat16).to(logits.dtype)


def weights_in_bfloat16(model: Any, layer: int) -> AbstractContextManager[None]:
    return rerouted(
        model, layer, lambda gate, logits, w, ids: (_bfloat16_weights(gate, logits, ids), ids)
    )


def weights_in_bfloat16_reordered(model: Any, layer: int) -> AbstractContextManager[None]:
    return rerouted(
        model,
        layer,
        lambda gate, logits, w, ids: in_other_order(_bfloat16_weights(gate, logits, ids), ids),
    )


def slots_reordered(model: Any, layer: int) -> AbstractContextManager[None]:
    return rerouted(model, layer, lambda gate, logits, w, ids: in_other_order(w, ids))


def softmax_after_top_k(model: Any, layer: int) -> AbstractContextManager[None]:
    def change(gate: Any, logits: Any, weights: Any, ids: Any) -> Any:
        chosen = logits.float().gather(-1, ids)
        if gate.norm_topk_prob:
            return chosen.softmax(-1).to(logits.dtype), ids
        return (chosen - logits.float().logsumexp(-1, keepdim=True)).exp().to(logits.dtype), ids

    return rerouted(model, layer, change)


def raw_logits_as_weights(model: Any, layer: int) -> AbstractContextManager[None]:
    return rerouted(model, layer, lambda gate, logits, w, ids: (logits.gather(-1, ids), ids))


def weights_scaled(model: Any, layer: int) -> AbstractContextManager[None]:
    def change(gate: Any, logits: Any, weights: Any, ids: Any) -> Any:
        # scaled before they are rounded, as the router would
        wide = weights_for(gate, probabilities(logits), ids, logits.float().dtype)
        return (wide * SCALING).to(weights.dtype), ids

    return rerouted(model, layer, change)


def weights_normed_over_tokens(model: Any, layer: int) -> AbstractContextManager[None]:
    def change(gate: Any, logits: Any, weights: Any, ids: Any) -> Any:
        chosen = probabilities(logits).gather(-1, ids)
        return (chosen / chosen.sum(0, keepdim=True)).to(weights.dtype), ids

    return rerouted(model, layer, change)


def _logits(name: str, form: Any, report: str, description: str, **more: Any) -> ModelFault:
    return ModelFault(
        name,
        "router_logits",
        "router",
        "mlp.router_logits",
        form,
        (report,),
        description,
        dense=None,
        **more,
    )


def _weights(
    name: str, form: Any, reports: tuple[str, ...], description: str, **more: Any
) -> ModelFault:
    return ModelFault(
        name,
        "routing_weights",
        "router",
        "mlp.expert_weights",
        form,
        reports,
        description,
        dense=None,
        **more,
    )


FAULTS: tuple[ModelFault, ...] = (
    _logits(
        "router-input-normed-again",
        input_normed_again,
        "NVIDIA-NeMo/Automodel#1852",
        "the router's input is normed once more, without a weight",
        changes=0.9,
    ),
    _logits(
        "router-input-norm-weight-twice",
        input_norm_weight_twice,
        "NVIDIA-NeMo/Automodel#1852",
        "the router's input is normed once more, with the norm's weight",
        changes=0.9,
    ),
    _logits(
        "router-in-bfloat16",
        in_bfloat16,
        "vllm-project/vllm#14027",
        "the router of a float32 model computes in bfloat16",
        dtypes=("float32",),
        changes=0.9,
    ),
    _logits(
        "router-low-precision",
        router_low_precision,
        "vllm-project/vllm#14027",
        "the router reads its input in 8 bits (e4m3, one scale a tensor)",
        changes=0.9,
    ),
    _logits(
        "router-weight-4-bit",
        weight_in_4_bits,
        "Avarok-Cybersecurity/atlas#186",
        f"the router's weight is quantised to 4 bits, {FOUR_BIT_GROUP} channels a scale",
        changes=0.9,
    ),
    _weights(
        "routing-weights-bfloat16",
        weights_in_bfloat16,
        ("vllm-project/vllm#49927",),
        "the weights of the right experts come from a softmax in bfloat16, in a float32 model",
        dtypes=("float32",),
        changes=0.9,
    ),
    _weights(
        "replayed-ids-new-weights",
        weights_in_bfloat16_reordered,
        ("radixark/miles#2722",),
        "replayed experts, in another order of slots, get weights from a softmax in bfloat16",
        dtypes=("float32",),
        sides=("trainer",),
        changes=0.9,
    ),
    _weights(
        "top-k-not-renormalised",
        top_k_not_renormalised,
        ("pytorch/torchtitan#1448", "NVIDIA/Megatron-LM#1593"),
        "the weights of a token's experts do not add up to one, or do where they should not",
        changes=0.9,
    ),
    _weights(
        "raw-logits-as-weights",
        raw_logits_as_weights,
        ("sgl-project/sglang#35160",),
        "the chosen experts are weighted with their logits, of which no softmax was taken",
        changes=0.9,
    ),
    _weights(
        "routing-weights-scaled",
        weights_scaled,
        ("sgl-project/sglang-jax#1282",),
        f"one side alone scales the weights by {SCALING:g}",
        changes=0.9,
    ),
    _weights(
        "weights-normalised-over-tokens",
        weights_normed_over_tokens,
        ("databricks/megablocks#87",),
        "weights are normalised over the tokens of a call, not over a token's experts",
        changes=0.9,
    ),
)

CONTROLS: tuple[Control, ...] = tuple(
    Control(name, description, (report,), form, dtypes=dtypes, moe_only=True)
    for name, form, report, description, dtypes in (
        (
            "router in float32",
            in_float32,
            "vllm-project/vllm#14027",
            "the router of a bfloat16 model computes in float32 and does not round its logits",
            ("bfloat16",),
        ),
        (
            "near ties before rounding",
            chosen_before_rounding,
            "vllm-project/vllm#14027",
            "experts are chosen by logits that are not rounded yet, so near ties may flip",
            ("bfloat16", "float32"),
        ),
        (
            "routing weights by bfloat16 softmax",
            weights_in_bfloat16,
            "vllm-project/vllm#49927",
            "the weights come from a softmax in bfloat16, in a bfloat16 model",
            ("bfloat16",),
        ),
        (
            "replayed ids, bfloat16 weights",
            weights_in_bfloat16_reordered,
            "radixark/miles#2722",
            "the same experts in another order of slots, with weights from a bfloat16 softmax",
            ("bfloat16",),
        ),
        (
            "slots in another order",
            slots_reordered,
            "radixark/miles#2722",
            "a token's experts, with their weights, come least weight first",
            ("bfloat16", "float32"),
        ),
        (
            "softmax after top-k",
            softmax_after_top_k,
            "NVIDIA/Megatron-LM#1593",
            "softmax over the chosen logits instead of over all and then renormalised",
            ("bfloat16", "float32"),
        ),
        (
            "router gradient detached",
            gradient_detached,
            "huggingface/transformers#48687",
            "only the backward of the routing weights is wrong",
            ("bfloat16", "float32"),
        ),
    )
)
