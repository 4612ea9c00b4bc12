"""How a layer's experts are made to get other tokens, to compute or to add up otherwise."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.fault_tools import forward_replaced, parameter_replaced
from scripts.planted.router_forms import SCALING
from scripts.planted.routing_forms import sparse_mlp

TILE = 48
"""Inner channels that a tile of the down projection holds."""
CLAMP = 2.0
BIAS_STD = 0.1
"""Deviation of the biases of the experts' outputs."""
SHARED = 0.5
"""What a rank's partial sums hold of the shared expert."""


def by_slot(own: Any, hidden: Any, ids: Any, weights: Any) -> Any:
    """What the experts give in each slot: [token, slot, hidden], each rounded as they round it."""
    each = own(
        hidden.repeat_interleave(ids.shape[1], 0), ids.reshape(-1, 1), weights.reshape(-1, 1)
    )
    return each.unflatten(0, ids.shape)


def dummy_token(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    experts = sparse_mlp(model, layer).experts

    def forward(own: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        out = own(hidden, ids, weights)
        idle = torch.bincount(ids.flatten(), minlength=experts.num_experts) == 0
        idle = idle.nonzero()
        if len(idle):
            ones = weights.new_ones(idle.shape)
            extra = own(hidden[:1].expand(len(idle), -1), idle, ones)
            out = torch.cat((out[:1] + extra.sum(0, keepdim=True), out[1:]))
        return out

    return forward_replaced(experts, forward)


def permuted_twice(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    def forward(own: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        order = ids.flatten().sort(stable=True)[1]
        sorted_rows = by_slot(own, hidden, ids, weights).flatten(0, 1)[order].float()
        tokens = order[order] // ids.shape[1]
        out = torch.zeros_like(hidden, dtype=torch.float32)
        return out.index_add(0, tokens, sorted_rows).to(hidden.dtype)

    return forward_replaced(sparse_mlp(model, layer).experts, forward)


def last_tile_dropped(model: Any, layer: int) -> AbstractContextManager[None]:
    experts = sparse_mlp(model, layer).experts
    weight = experts.down_proj.detach().clone()
    width = weight.shape[-1]
    if not 0 < width % TILE < width:
        raise LayerBisectError(
            f"tiles of {TILE} leave no rest of the experts' {width} inner channels"
        )
    weight[..., width - width % TILE :] = 0

    def forward(own: Any, *args: Any) -> Any:
        with parameter_replaced(experts, "down_proj", weight):
            return own(*args)

    return forward_replaced(experts, forward)


def _activation(model: Any, layer: int) -> Any:
    mlp = model.model.layers[layer].mlp
    return getattr(mlp, "experts", mlp).act_fn


def gate_clamped(model: Any, layer: int) -> AbstractContextManager[None]:
    return forward_replaced(_activation(model, layer), lambda own, gate: own(gate.clamp(max=CLAMP)))


def activation_lost(model: Any, layer: int) -> AbstractContextManager[None]:
    return forward_replaced(_activation(model, layer), lambda own, gate: gate)


def weights_of_another_token(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    def forward(own: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        rows, slots = (torch.arange(n, device=ids.device) for n in ids.shape)
        return own(hidden, ids, weights.flatten()[rows[:, None] + slots])

    return forward_replaced(sparse_mlp(model, layer).experts, forward)


def bias_unweighted(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    experts = sparse_mlp(model, layer).experts
    shape = (experts.num_experts, experts.hidden_dim)
    bias = BIAS_STD * torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def forward(own: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        # the model has no bias: its weighted part is left out on both sides
        excess = (1 - weights.float())[..., None] * bias.to(ids.device)[ids]
        each = by_slot(own, hidden, ids, weights).float()
        return (each + excess).sum(1).to(hidden.dtype)

    return forward_replaced(experts, forward)


def shared_expert_partial(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    def forward(own: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        # expert 0 stands for the shared one; what both sides have of it is left out
        shared = torch.zeros_like(ids[:, :1])
        lacking = torch.full_like(weights[:, :1], SHARED - 1)
        return own(hidden, torch.cat((ids, shared), 1), torch.cat((weights, lacking), 1))

    return forward_replaced(sparse_mlp(model, layer).experts, forward)


def output_scaled(model: Any, layer: int) -> AbstractContextManager[None]:
    return forward_replaced(
        sparse_mlp(model, layer).experts,
        lambda own, hidden, ids, weights: own(hidden, ids, weights) * SCALING,
    )


def weights_on_input(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    def forward(own: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        slots = (hidden[:, None] * weights[..., None]).flatten(0, 1).to(hidden.dtype)
        ones = torch.ones_like(weights).reshape(-1, 1)
        each = own(slots, ids.reshape(-1, 1), ones).unflatten(0, ids.shape)
        return each.sum(1)

    return forward_replaced(sparse_mlp(model, layer).experts, forward)


def combined_in_turn(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    def forward(own: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        each = by_slot(own, hidden, ids, torch.ones_like(weights)).float()
        each = each * weights.float()[..., None]
        rows, slots = (torch.arange(n, device=ids.device) for n in ids.shape)
        turn = (rows[:, None] + slots) % ids.shape[1]
        out = torch.zeros_like(hidden, dtype=torch.float32)
        for slot in slots:
            out = out + each[rows, turn[:, slot]]
        return out.to(hidden.dtype)

    return forward_replaced(sparse_mlp(model, layer).experts, forward)


def weights_at_activation(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch
    from torch.nn.functional import linear

    experts = sparse_mlp(model, layer).experts

    def forward(own: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        out = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in range(experts.num_experts):
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            gate, up = linear(hidden[rows], experts.gate_up_proj[expert]).float().chunk(2, -1)
            inner = experts.act_fn(gate) * up * weights[rows, slots, None].float()
            each = linear(inner.to(hidden.dtype), experts.down_proj[expert])
            out.index_add_(0, rows, each.float())
        return out.to(hidden.dtype)

    return forward_replaced(experts, forward)
