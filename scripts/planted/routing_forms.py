"""What forms of faults in routers share: a layer's router, and the weights that it would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.fault_tools import forward_replaced
from scripts.planted.fault import Form

Change = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""Called with the router, its logits [token, expert], the weights and the ids [token, slot] that it
chose; returns other weights and ids."""


def sparse_mlp(model: Any, layer: int) -> Any:
    """The MLP of a layer with experts; raises LayerBisectError where it has none."""
    mlp = model.model.layers[layer].mlp
    if not hasattr(mlp, "experts"):
        raise LayerBisectError(f"this fault needs experts; layer {layer} has none")
    return mlp


def rerouted(model: Any, layer: int, change: Change) -> AbstractContextManager[None]:
    """Let ``change`` decide on what a router makes of its own logits."""
    gate = sparse_mlp(model, layer).gate

    def forward(own: Any, hidden: Any) -> Any:
        logits, weights, ids = own(hidden)
        return logits, *change(gate, logits, weights, ids)

    return forward_replaced(gate, forward)


def everywhere(form: Form) -> Form:
    """The same in every layer with experts, as an engine that computes otherwise has it."""

    @contextmanager
    def all_layers(model: Any, layer: int) -> Iterator[None]:
        routed = routed_layers(model)
        if not routed:
            raise LayerBisectError("this difference needs experts; the model has none")
        with ExitStack() as stack:
            for number in routed:
                stack.enter_context(form(model, number))
            yield

    return all_layers


def routed_layers(model: Any) -> list[int]:
    """Numbers of the layers with experts."""
    return [i for i, block in enumerate(model.model.layers) if hasattr(block.mlp, "experts")]


def probabilities(logits: Any) -> Any:
    """Float32 [token, expert], as the router has them."""
    return logits.float().softmax(-1)


def weights_for(gate: Any, scores: Any, ids: Any, dtype: Any) -> Any:
    """The weights [token, slot] of given experts from the scores [token, expert] of all."""
    chosen = scores.gather(-1, ids)
    if gate.norm_topk_prob:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen.to(dtype)


def in_other_order(weights: Any, ids: Any) -> tuple[Any, Any]:
    """The same experts with the same weights, the least first."""
    return weights.flip(-1).contiguous(), ids.flip(-1).contiguous()
