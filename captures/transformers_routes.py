"""Force a capture's expert routes in a transformers model, and its weights where wanted.

The gate's own code runs; only its top-k is told which experts to choose. So the weights of the
forced experts are what this very gate gives them, whatever it does with its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from layerbisect.captures.forcing import Forcing, Guard
from layerbisect.captures.routes import Choice, at_experts, check_choice, holding
from layerbisect.captures.rows import PrefixKeys, Rows, prefix_keys
from layerbisect.captures.transformers_adapter import Anatomy
from layerbisect.captures.transformers_calls import Call
from layerbisect.captures.wrapping import method_wrapped

if TYPE_CHECKING:
    import torch


@contextmanager
def forced_gates(anatomy: Anatomy, forcing: Forcing, guarded: Guard) -> Iterator[None]:
    """Let the gates of a model choose as ``forcing`` says while the context is open."""
    with ExitStack() as stack:
        stack.callback(forcing.forget)
        for layer in forcing.layers:
            gate = anatomy.model.model.layers[layer].mlp.gate
            forward = partial(_forward, layer, gate, forcing, guarded)
            stack.enter_context(method_wrapped(gate, "forward", forward))
        yield


def _forward(
    layer: int,
    gate: Any,
    forcing: Forcing,
    guarded: Guard,
    own: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    import torch

    hidden = args[0] if args else kwargs["hidden_states"]
    what = f"forcing the routes of layer {layer}"
    choice: Choice | None = None
    with guarded(what):
        given = forcing.choice(layer, hidden.shape[:-1].numel())
        if given is not None:
            check_choice(given, experts=gate.num_experts, slots=gate.top_k)
        choice = given
    if choice is None or not choice.found.any():
        return own(*args, **kwargs)
    rows = torch.from_numpy(np.flatnonzero(choice.found)).to(hidden.device)
    ids = torch.from_numpy(choice.ids[choice.found]).to(hidden.device)
    with _choosing(rows, ids):
        logits, scores, indices = own(*args, **kwargs)
    with guarded(what):
        if not torch.equal(indices.index_select(0, rows), ids):
            raise ValueError("the gate does not choose by a torch.topk over its experts")
        if choice.weights is not None:
            weights = torch.from_numpy(choice.weights[choice.found]).to(hidden.device)
            wide = scores.to(holding(weights, scores.dtype))
            scores = wide.index_copy(0, rows, weights.to(wide.dtype))
        forcing.count(choice)
    return logits, scores, indices


@contextmanager
def _choosing(rows: torch.Tensor, ids: torch.Tensor) -> Iterator[None]:
    """Let every top-k over experts choose ``ids`` [n, slot] in the rows ``rows`` (int64 [n])."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Chosen(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., Any],
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            given = kwargs or {}
            own = func(*args, **given)
            if func not in (torch.topk, torch.Tensor.topk) or own[1].shape[1:] != ids.shape[1:]:
                return own
            scores = args[0] if args else given["input"]
            return torch.return_types.topk(at_experts(scores, own, rows, ids))

    with Chosen():
        yield


def keys_of(call: Call) -> PrefixKeys:
    """The keys of a call's rows, those of decode steps included: its lanes know what came before.

    Rows after tokens that nobody saw have none.
    """
    batch = call.batch
    seen = [batch.context, batch.rows]
    for sequence, lane in call.fed.continues.items():
        prefix = call.before[lane].prefix
        # a token that nobody saw is negative, and leaves a hole
        if (prefix >= 0).all():
            seen.append(Rows.of(np.full(len(prefix), sequence), np.arange(len(prefix)), prefix))
    names, salts = [s.name for s in batch.sequences], [s.salt for s in batch.sequences]
    return prefix_keys(batch.rows, Rows.concatenate(seen), salts, names)
