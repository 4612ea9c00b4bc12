"""Faults in which experts are chosen: the top-k, and routes that are replayed wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.fault_tools import forward_replaced
from scripts.planted.fault import ModelFault
from scripts.planted.routing_forms import (
    probabilities,
    rerouted,
    routed_layers,
    sparse_mlp,
    weights_for,
)

BIAS_STD = 0.1
"""Deviation of the correction bias, on probabilities."""
GROUPS = 4
ROWS = 16
"""Tokens of a call that the router's kernel covers."""
BUFFER = 32
"""Tokens of a call that the top-k's buffer holds."""


def correction_bias(gate: Any) -> Any:
    """A bias of the experts' scores, float32 [expert]: the same each time, as a checkpoint's is."""
    import torch

    noise = torch.randn(gate.num_experts, generator=torch.Generator().manual_seed(0))
    return (BIAS_STD * noise).to(gate.weight.device)


def bias_in_weights(model: Any, layer: int) -> AbstractContextManager[None]:
    def change(gate: Any, logits: Any, weights: Any, ids: Any) -> Any:
        biased = probabilities(logits) + correction_bias(gate)
        return weights_for(gate, biased, ids, weights.dtype), ids

    return rerouted(model, layer, change)


def biased_choice(model: Any, layer: int) -> AbstractContextManager[None]:
    def change(gate: Any, logits: Any, weights: Any, ids: Any) -> Any:
        scores = probabilities(logits)
        chosen = (scores + correction_bias(gate)).topk(gate.top_k, -1)[1]
        return weights_for(gate, scores, chosen, weights.dtype), chosen

    return rerouted(model, layer, change)


def group_limited(model: Any, layer: int) -> AbstractContextManager[None]:
    gate = sparse_mlp(model, layer).gate
    each, rest = divmod(gate.num_experts, GROUPS)
    if rest or each < 2 or GROUPS // 2 * each < gate.top_k:
        raise LayerBisectError(
            f"grouped top-k needs {GROUPS} groups of at least 2 experts that hold the top "
            f"{gate.top_k}; the model has {gate.num_experts} experts"
        )

    def change(gate: Any, logits: Any, weights: Any, ids: Any) -> Any:
        scores = probabilities(logits)
        grouped = scores.unflatten(-1, (GROUPS, each))
        # a group counts by its two best experts' raw logits, not by its best score
        pairs = logits.float().unflatten(-1, (GROUPS, each)).topk(2, -1)[0]
        best = pairs.sum(-1).topk(GROUPS // 2, -1)[1]
        allowed = scores.new_zeros(len(scores), GROUPS).scatter(-1, best, 1.0)
        limited = (grouped * allowed[..., None]).flatten(-2)
        chosen = limited.topk(gate.top_k, -1)[1]
        return weights_for(gate, scores, chosen, weights.dtype), chosen

    return rerouted(model, layer, change)


def rows_dropped(model: Any, layer: int) -> AbstractContextManager[None]:
    def change(gate: Any, logits: Any, weights: Any, ids: Any) -> Any:
        weights, ids = weights.clone(), ids.clone()
        weights[ROWS:], ids[ROWS:] = 0, 0
        return weights, ids

    return rerouted(model, layer, change)


def buffer_wraps(model: Any, layer: int) -> AbstractContextManager[None]:
    def change(gate: Any, logits: Any, weights: Any, ids: Any) -> Any:
        import torch

        # a later token's entry finds that of an earlier one in its place
        held = torch.arange(len(ids), device=ids.device) % BUFFER
        return weights[held], ids[held]

    return rerouted(model, layer, change)


def replayed_late(model: Any, layer: int) -> AbstractContextManager[None]:
    def change(gate: Any, logits: Any, weights: Any, ids: Any) -> Any:
        given = ids.roll(1, 0)
        return weights_for(gate, probabilities(logits), given, weights.dtype), given

    return rerouted(model, layer, change)


def replayed_from_layer_before(model: Any, layer: int) -> AbstractContextManager[None]:
    routed, at = routed_layers(model), _place(model, layer)
    # before the first one an index of -1 finds the last
    return _replayed(model, {layer: routed[at - 1]})


def replayed_in_reverse(model: Any, layer: int) -> AbstractContextManager[None]:
    routed = routed_layers(model)
    _place(model, routed[0] if routed else 0)
    return _replayed(model, dict(zip(routed, reversed(routed), strict=True)))


def _place(model: Any, layer: int) -> int:
    """Which of the layers with experts a layer is."""
    sparse_mlp(model, layer)
    routed = routed_layers(model)
    if len(routed) < 2:
        raise LayerBisectError("routes of another layer need two layers with experts")
    return routed.index(layer)


@contextmanager
def _replayed(model: Any, sources: Mapping[int, int]) -> Iterator[None]:
    """Give layers the experts that other ones chose, in a forward without a KV cache.

    The routes to replay come from a model of the same weights that computes rightly, and computes
    first: what is replayed into an early layer may be a late one's.
    """
    twin: list[Any] = []
    recorded: dict[int, Any] = {}

    def record(own: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None:
            raise LayerBisectError("routes are replayed in a trainer, which has no KV cache")
        if not twin:
            twin.append(_twin(model, recorded, sources.values()))
        twin[0](*args, **kwargs)
        return own(*args, **kwargs)

    def replay(source: int) -> Any:
        def change(gate: Any, logits: Any, weights: Any, ids: Any) -> Any:
            given = recorded[source]
            return weights_for(gate, probabilities(logits), given, weights.dtype), given

        return change

    with ExitStack() as stack:
        stack.enter_context(forward_replaced(model.model, record))
        for layer, source in sources.items():
            stack.enter_context(rerouted(model, layer, replay(source)))
        yield


def _twin(model: Any, recorded: dict[int, Any], layers: Any) -> Any:
    """The decoder of a right model on the same weights, which notes what its routers choose."""
    import copy

    import torch

    with torch.random.fork_rng(devices=[]):
        right = type(model)(copy.deepcopy(model.config)).eval()
    right.load_state_dict(model.state_dict(), assign=True)
    for layer in layers:
        right.model.layers[layer].mlp.gate.register_forward_hook(
            lambda gate, args, out, layer=layer: recorded.__setitem__(layer, out[2])
        )
    return right.model


def _ids(name: str, form: Any, report: str, description: str, **more: Any) -> ModelFault:
    more = {"point": "mlp.expert_ids", **more}
    return ModelFault(
        name,
        "topk",
        "router",
        form=form,
        reports=(report,),
        description=description,
        dense=None,
        **more,
    )


FAULTS: tuple[ModelFault, ...] = (
    _ids(
        "correction-bias-in-weights",
        bias_in_weights,
        "huggingface/transformers#41663",
        "a bias that should only select experts is in their weights, too",
        point="mlp.expert_weights",
        changes=0.9,
    ),
    _ids(
        "correction-bias-on-one-side",
        biased_choice,
        "Avarok-Cybersecurity/atlas#186",
        "one side alone selects experts with a correction bias",
        changes=0.02,
    ),
    _ids(
        "group-limited-top-k",
        group_limited,
        "ROCm/aiter#924",
        f"experts come from {GROUPS // 2} of {GROUPS} groups, which are chosen by their raw logits",
        # of a few tokens alone
        changes=0.005,
    ),
    _ids(
        "router-rows-dropped",
        rows_dropped,
        "mirage-project/mirage#764",
        f"tokens of a call past the first {ROWS} get expert 0 with weight 0 in each slot",
        passes="prefill",
        where=rf"positions >= 1[{ROWS % 10}-9]",
        changes=0.5,
    ),
    _ids(
        "top-k-buffer-wraps",
        buffer_wraps,
        "vllm-project/vllm#42810",
        f"tokens of a call past the first {BUFFER} get the experts of an earlier one",
        passes="prefill",
        where=rf"positions >= 3[{BUFFER % 10}-9]",
        changes=0.1,
    ),
    _ids(
        "replayed-from-layer-before",
        replayed_from_layer_before,
        "verl-project/verl#5037",
        "the experts that are replayed are those of the layer before",
        sides=("trainer",),
        changes=0.5,
    ),
    _ids(
        "replayed-a-token-late",
        replayed_late,
        "NovaSky-AI/SkyRL#1908",
        "the experts that are replayed are those of the token before",
        sides=("trainer",),
        changes=0.5,
    ),
    _ids(
        "replayed-layers-reversed",
        replayed_in_reverse,
        "radixark/miles#2570",
        "the layers' experts are replayed in reverse order of layers",
        sides=("trainer",),
        layers="all",
        changes=0.5,
    ),
)
