"""How each fault is planted into a transformers model; :mod:`layerbisect.faults` lists them.

A form takes a causal language model and a layer's number, and gives the context in which one module
of that layer computes wrongly. Weights stay as they are in memory, except where the fault is a
wrongly loaded parameter. What the wrong operator is given stays right, so a capture shows what an
engine with that bug would show. Forms that are no layer's ignore the number.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.fault_tools import attribute_replaced, forward_replaced, parameter_replaced

NORM_EPS = 1e-3
HEAD_SCALE = 1.01
STALE_NOISE = 0.02


def norm_eps(model: Any, layer: int) -> AbstractContextManager[None]:
    norm = model.model.layers[layer].input_layernorm
    return attribute_replaced(norm, "variance_epsilon", NORM_EPS)


def norm_weight(model: Any, layer: int) -> AbstractContextManager[None]:
    layers = model.model.layers
    if len(layers) < 2:
        raise LayerBisectError("norm-weight takes another layer's weight; the model has one layer")
    other = layers[layer + 1 if layer + 1 < len(layers) else layer - 1].post_attention_layernorm
    norm = layers[layer].post_attention_layernorm
    return parameter_replaced(norm, "weight", other.weight.detach().clone())


def residual_dropped(model: Any, layer: int) -> AbstractContextManager[None]:
    block = model.model.layers[layer]

    def forward(own: Any, hidden_states: Any, **kwargs: Any) -> Any:
        # the layer's own steps, but what attention adds is lost
        block.self_attn(hidden_states=block.input_layernorm(hidden_states), **kwargs)
        return hidden_states + block.mlp(block.post_attention_layernorm(hidden_states))

    return forward_replaced(block, forward)


def router_low_precision(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    def forward(own: Any, hidden: Any) -> Any:
        scale = hidden.float().abs().amax().clamp(min=1e-12) / 448
        coarse = (hidden.float() / scale).to(torch.float8_e4m3fn).float() * scale
        return own(coarse.to(hidden.dtype))

    return forward_replaced(model.model.layers[layer].mlp.gate, forward)


def top_k_not_renormalised(model: Any, layer: int) -> AbstractContextManager[None]:
    gate = model.model.layers[layer].mlp.gate
    # a model that does not renormalise gets the opposite fault
    return attribute_replaced(gate, "norm_topk_prob", not gate.norm_topk_prob)


def experts_swapped(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    experts = model.model.layers[layer].mlp.experts
    if experts.num_experts < 2:
        raise LayerBisectError("experts-swapped swaps two experts; the model has one")
    order = torch.arange(experts.num_experts)
    order[:2] = torch.tensor([1, 0])

    def forward(own: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        return own(hidden, order.to(ids.device)[ids], weights)

    return forward_replaced(experts, forward)


def gate_up_swapped(model: Any, layer: int) -> AbstractContextManager[None]:
    mlp = model.model.layers[layer].mlp
    if not hasattr(mlp, "experts"):
        return forward_replaced(
            mlp, lambda own, x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))
        )
    weight = mlp.experts.gate_up_proj.detach()
    swapped = weight.roll(weight.shape[1] // 2, 1)

    def forward(own: Any, *args: Any, **kwargs: Any) -> Any:
        with parameter_replaced(mlp.experts, "gate_up_proj", swapped):
            return own(*args, **kwargs)

    return forward_replaced(mlp.experts, forward)


def final_norm_weight(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    weight = model.model.norm.weight.detach()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    stale = weight * (1 + STALE_NOISE * noise).to(weight.device)

    def forward(own: Any, *args: Any, **kwargs: Any) -> Any:
        with parameter_replaced(model.model.norm, "weight", stale.to(weight.dtype)):
            return own(*args, **kwargs)

    return forward_replaced(model.model.norm, forward)


def head_scaled(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    head = model.lm_head

    def forward(own: Any, hidden: Any) -> Any:
        # scaled before it is rounded, as a kernel would
        logits = torch.nn.functional.linear(hidden.float(), head.weight.float())
        return (logits * HEAD_SCALE).to(hidden.dtype)

    return forward_replaced(head, forward)
