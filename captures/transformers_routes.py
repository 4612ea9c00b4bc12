"""Force a capture's expert routes in a transformers model, and its weights where wanted.

The gate's own code runs; only its top-k is told which experts to choose. So the weights of the
forced experts are what this very gate gives them, whatever it does with its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.format import RoutesFrom
from layerbisect.captures.routes import Choice, Routes, at_experts, check_choice, holding
from layerbisect.captures.rows import PrefixKeys, Rows, prefix_keys
from layerbisect.captures.transformers_adapter import Anatomy
from layerbisect.captures.transformers_calls import Call
from layerbisect.captures.wrapping import method_wrapped

if TYPE_CHECKING:
    import torch

Guard = Callable[[str], AbstractContextManager[None]]
"""Runs a block of ours so that an error in it does not reach the model; takes what it is about."""


class ForcedRoutes:
    """Forces routes in the calls that it is told of, while attached.

    Args:
        anatomy: the model.
        routes: whose routes; with their weights where they were opened with them.

    Raises LayerBisectError for a model without experts, or a layer of which ``routes`` has none.
    """

    def __init__(self, anatomy: Anatomy, routes: Routes) -> None:
        if not anatomy.moe_layers:
            raise LayerBisectError(
                f"no routes can be forced in this {type(anatomy.model).__name__}: it has no "
                "experts; leave routes out"
            )
        routes.require(anatomy.moe_layers)
        self._gates = {i: anatomy.model.model.layers[i].mlp.gate for i in anatomy.moe_layers}
        self._routes = routes
        self._keys: PrefixKeys | None = None
        self._index: NDArray[np.int64] = np.empty(0, np.int64)
        self._grid = 0
        # in how many layers each row of the call was forced
        self._times: NDArray[np.intp] = np.empty(0, np.intp)
        self._rows = self._kept = 0

    @property
    def kind(self) -> RoutesFrom:
        """What a capture says of its routes where these are forced."""
        return "forced with weights" if self._routes.weights else "forced"

    @contextmanager
    def attached(self, guarded: Guard) -> Iterator[None]:
        """Stand before the gates of the model while the context is open."""
        with ExitStack() as stack:
            stack.callback(self.forget)
            for layer, gate in self._gates.items():
                forward = partial(self._forward, layer, gate, guarded)
                stack.enter_context(method_wrapped(gate, "forward", forward))
            yield

    def forget(self) -> None:
        """Leave calls alone until the next :meth:`begin`; one that was open broke off."""
        self._keys = None

    def begin(self, call: Call) -> None:
        """Force the routes of this call's rows until :meth:`end`."""
        self._keys = keys_of(call)
        self._index, self._grid = call.batch.index, call.batch.grid
        self._times = np.zeros(len(self._index), np.intp)

    def end(self) -> None:
        """Count what was forced in the call that was begun."""
        if self._keys is not None:
            self._rows += len(self._index)
            self._kept += int((self._times < len(self._gates)).sum())
        self.forget()

    def problems(self) -> list[str]:
        """Say in sentences where the routes of the calls so far were not those wanted."""
        return self._routes.problems(self._rows, self._kept)

    def _forward(
        self, layer: int, gate: Any, guarded: Guard, own: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        import torch

        hidden = args[0] if args else kw["hidden_states"]
        choice: Choice | None = None
        with guarded(f"forcing the routes of layer {layer}"):
            choice = self._choice(layer, gate, hidden)
        if choice is None or not choice.found.any():
            return own(*args, **kw)
        device = hidden.device
        rows = torch.from_numpy(self._index[choice.found]).to(device)
        ids = torch.from_numpy(choice.ids[choice.found]).to(device)
        with _choosing(rows, ids):
            logits, scores, indices = own(*args, **kw)
        with guarded(f"forcing the routes of layer {layer}"):
            if not torch.equal(indices.index_select(0, rows), ids):
                raise ValueError("the gate does not choose by a torch.topk over its experts")
            if choice.weights is not None:
                weights = torch.from_numpy(choice.weights[choice.found]).to(device)
                wide = scores.to(holding(weights, scores.dtype))
                scores = wide.index_copy(0, rows, weights.to(wide.dtype))
            self._times += choice.found
        return logits, scores, indices

    def _choice(self, layer: int, gate: Any, hidden: torch.Tensor) -> Choice | None:
        if self._keys is None:
            return None
        choice = self._routes.look_up(layer, self._keys)
        check_choice(choice, experts=gate.num_experts, slots=gate.top_k)
        if hidden.shape[:-1].numel() != self._grid:
            raise ValueError(f"a gate was given {list(hidden.shape)}, and not {self._grid} rows")
        return choice


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
