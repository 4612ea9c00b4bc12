"""How a router is made to give other logits, or other weights to the experts that it chose."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from layerbisect.fault_tools import forward_replaced, parameter_replaced
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
