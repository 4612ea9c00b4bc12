"""Sums split over ranks, as tensor and expert parallelism add them up, on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from layerbisect.captures.errors import LayerBisectError
from layerbisect.fault_tools import forward_replaced, parameter_replaced

RANKS = 2

Rounding = Callable[[torch.Tensor], torch.Tensor]


def kept(partial_sum: torch.Tensor) -> torch.Tensor:
    """Leave a partial sum in the model's dtype."""
    return partial_sum


def in_bfloat16(partial_sum: torch.Tensor) -> torch.Tensor:
    """Round a partial sum to bfloat16, as where ranks exchange it so."""
    return partial_sum.bfloat16().to(partial_sum.dtype)


@contextmanager
def tensor_parallel(model: Any, layer: int, *, rounding: Rounding = kept) -> Iterator[None]:
    """Add up the output projections, and the down projections of a dense MLP, from two ranks."""
    with ExitStack() as stack:
        for block in model.model.layers:
            linears = [block.self_attn.o_proj]
            if not hasattr(block.mlp, "experts"):
                linears.append(block.mlp.down_proj)
            for linear in linears:
                forward = partial(_row_parallel, linear, rounding)
                stack.enter_context(forward_replaced(linear, forward))
        yield


def _row_parallel(linear: Any, rounding: Rounding, own: Any, hidden: torch.Tensor) -> torch.Tensor:
    parts = zip(hidden.chunk(RANKS, -1), linear.weight.chunk(RANKS, -1), strict=True)
    return _added([rounding(torch.nn.functional.linear(*part)) for part in parts])


@contextmanager
def tensor_parallel_experts(model: Any, layer: int) -> Iterator[None]:
    """Add up all experts from two ranks that hold half of each expert's width."""
    experts = [experts for _, experts in sparse(model)]
    with ExitStack() as stack:
        for one in experts:
            stack.enter_context(forward_replaced(one, partial(_split_width, one)))
        yield


def _split_width(experts: Any, own: Any, *args: torch.Tensor) -> torch.Tensor:
    down = experts.down_proj.detach()
    width = down.shape[-1]
    sums = []
    for rank in range(RANKS):
        inside = torch.arange(width, device=down.device) * RANKS // width == rank
        with parameter_replaced(experts, "down_proj", down * inside):
            sums.append(own(*args))
    return _added(sums)


@contextmanager
def expert_parallel(model: Any, layer: int, *, rounding: Rounding = kept) -> Iterator[None]:
    """Add up all experts from two ranks that hold half of the experts."""
    with ExitStack() as stack:
        for _, experts in sparse(model):
            forward = partial(_split_experts, experts, rounding)
            stack.enter_context(forward_replaced(experts, forward))
        yield


def _split_experts(
    experts: Any,
    rounding: Rounding,
    own: Any,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    ranks = ids * RANKS // experts.num_experts
    return _added([rounding(own(hidden, ids, weights * (ranks == rank))) for rank in range(RANKS)])


def expert_added_twice(model: Any, layer: int) -> AbstractContextManager[None]:
    """Let both ranks add what expert 0 of one layer computes."""
    experts = dict(sparse(model)).get(layer)
    if experts is None:
        raise LayerBisectError(f"layer {layer} has no experts")

    def forward(
        own: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        added: torch.Tensor = own(hidden, ids, torch.where(ids == 0, RANKS * weights, weights))
        return added

    return forward_replaced(experts, forward)


def sparse(model: Any) -> list[tuple[int, Any]]:
    """Each layer that has experts, and these; raises LayerBisectError where none has."""
    layers = enumerate(model.model.layers)
    found = [(i, block.mlp.experts) for i, block in layers if hasattr(block.mlp, "experts")]
    if not found:
        raise LayerBisectError("needs a model with experts")
    return found


def _added(sums: list[torch.Tensor]) -> torch.Tensor:
    whole = sums[0]
    for one in sums[1:]:
        whole = whole + one
    return whole
