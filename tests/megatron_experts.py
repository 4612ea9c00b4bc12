"""Steps of Megatron jobs about experts, by `module:function`; see scripts/megatron_engine.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from scripts.megatron_engine import Rank, do_forward
from scripts.megatron_model import build


def alltoall(rank: Rank, step: dict[str, Any]) -> list[Any]:
    """Run the step's ``steps`` forward, with the all-to-all dispatcher and its ``config``.

    Its collectives are gloo's. It copies counts from CUDA to the host in a stream of its own: here
    they are on the host, where a stand-in for the stream has nothing to do, and one for the copy
    makes the array that a copy would make.
    """
    from megatron.core.transformer.moe import token_dispatcher

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", _on_the_host)
        patch.setattr("torch.cuda.Stream", _Stream)
        patch.setattr("torch.cuda.current_stream", _Stream)
        patch.setattr("torch.cuda.stream", lambda stream: nullcontext())
        config = {"moe_token_dispatcher_type": "alltoall", **step.get("config", {})}
        other = replace(rank, chunks=build(rank.model, rank.layout, **config))
        return [forward(other, one) for one in step["steps"]]


def _on_the_host(counts: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return counts.numpy() if as_numpy and counts is not None else counts


class _Stream:
    def wait_stream(self, other: _Stream) -> None:
        """There is nothing to wait for."""

    def record_event(self) -> _Stream:
        """Be its own event."""
        return self

    def synchronize(self) -> None:
        """There is nothing to wait for."""


def forward(rank: Rank, step: dict[str, Any]) -> list[list[float]] | None:
    """Run a forward step; ``expert_fault`` is one of `TRUTH`, as ``name:layer``, to be planted."""
    with planted(rank.chunks, step["expert_fault"]) if step.get("expert_fault") else nullcontext():
        return do_forward(rank, step)


TRUTH = {
    "inputs-swapped": "dispatch",
    "down-row-scaled": "experts",
    "last-slot-dropped": "combine",
    "weights-dropped": "combine",
    "outputs-swapped": "combine",
}
"""The operator that each fault is in."""

_LEAST = 2


@contextmanager
def planted(chunks: Sequence[Any], text: str) -> Iterator[None]:
    """Plant ``name:layer`` in the dispatcher or an expert of one layer while the block runs."""
    name, _, number = text.partition(":")
    plant = globals()["_" + name.replace("-", "_")]
    with ExitStack() as stack:
        for chunk in chunks:
            for module in chunk.modules():
                if hasattr(module, "router") and module.layer_number == int(number) + 1:
                    plant(module, stack)
        yield


def _replaced(
    owner: Any, name: str, faulty: Callable[..., Any], stack: ExitStack
) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(owner, name)
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(owner, name, faulty)
    return own


def _last_two(counts: Any) -> tuple[int, int]:
    """Where the last two rows of the first expert that has two are, in the dispatcher's order."""
    start = 0
    for count in counts.tolist():
        start += count
        if count >= _LEAST:
            return start - 2, start - 1
    raise ValueError("no expert has two rows")


def _exchanged(rows: Any, one: int, other: int) -> Any:
    rows = rows.clone()
    rows[[one, other]] = rows[[other, one]]
    return rows


def _inputs_swapped(mlp: Any, stack: ExitStack) -> None:
    def faulty(*args: Any) -> Any:
        rows, counts, probs = own(*args)
        return _exchanged(rows, *_last_two(counts)), counts, probs

    own = _replaced(mlp.token_dispatcher, "dispatch_postprocess", faulty, stack)


def _down_row_scaled(mlp: Any, stack: ExitStack) -> None:
    weight = mlp.experts.local_experts[3].linear_fc2.weight
    stack.callback(weight.data.__setitem__, 5, weight.data[5].clone())
    weight.data[5] *= 2


def _last_slot_dropped(mlp: Any, stack: ExitStack) -> None:
    def dropped(rows: Any, routed: Any, probs: Any) -> Any:
        expert, token = routed.T.nonzero(as_tuple=True)
        last = routed.cumsum(1)[token, expert] == mlp.config.moe_router_topk
        return rows.masked_fill(last[:, None], 0)

    _before_combine(mlp, stack, dropped)


def _weights_dropped(mlp: Any, stack: ExitStack) -> None:
    _before_combine(mlp, stack, lambda rows, routed, probs: (rows / probs).to(rows.dtype))


def _outputs_swapped(mlp: Any, stack: ExitStack) -> None:
    def swapped(rows: Any, routed: Any, probs: Any) -> Any:
        return _exchanged(rows, *_last_two(routed.sum(0)))

    _before_combine(mlp, stack, swapped)


def _before_combine(mlp: Any, stack: ExitStack, change: Callable[..., Any]) -> None:
    """Let ``change(rows, routed, probs)`` have what is then added up for this rank's tokens."""
    dispatcher = mlp.token_dispatcher

    def faulty(rows: Any) -> Any:
        if alltoall:
            routed = dispatcher.routing_map
            probs = dispatcher.probs.T.masked_select(routed.T)
        else:
            routed, probs = dispatcher.local_map, dispatcher.local_probs
        return own(change(rows, routed, probs[:, None]))

    alltoall = mlp.config.moe_token_dispatcher_type == "alltoall"
    name = "combine_postprocess" if alltoall else "combine_preprocess"
    own = _replaced(dispatcher, name, faulty, stack)
