"""Force a capture's expert routes in a Megatron-core router, and its weights where wanted.

The router's own code runs; only its top-k is told which experts to choose, at the place where
Megatron's own replay of routes asks. So the weights of the forced experts are what this very router
gives them: softmax before or after the top k, sigmoid, expert bias, scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.forcing import Guard
from layerbisect.captures.routes import Choice, at_experts, check_choice
from layerbisect.captures.wrapping import method_wrapped

if TYPE_CHECKING:
    import torch

Lookup = Callable[[int], Choice | None]
"""From how many rows a router was given to what it must choose in each, None to leave it alone."""


def forced_router(
    router: Any,
    lookup: Lookup,
    with_weights: bool,
    *,
    guarded: Guard,
    forced: Callable[[Choice], None],
) -> AbstractContextManager[None]:
    """Let a TopKRouter choose what ``lookup`` says while the context is open.

    Args:
        router: the module; its rows are flattened with s outermost, this rank's share of them.
        with_weights: use the looked-up weights, too. All probabilities are float32 then, which
            holds them, whatever rows this rank has: ranks send them to one another.
        guarded: keeps an error of ours from the job, whose router then chooses for itself.
        forced: called with what was chosen, where the router did choose so.

    Raises LayerBisectError for a router that does not ask for its experts, or drops some again.
    """
    if not hasattr(router, "router_replay"):
        raise LayerBisectError(
            f"no routes can be forced in this {type(router).__name__}: it asks no router_replay "
            "which experts to choose; run the capture with Megatron-core 0.16 or later"
        )
    config = router.config
    refused = {
        "moe_router_fusion": bool(config.moe_router_fusion),
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None,
        "moe_router_load_balancing_type": router.routing_type in ("sinkhorn", "quantile_balancing"),
    }
    for name in (name for name, bad in refused.items() if bad):
        raise LayerBisectError(
            f"no routes can be forced with {name}={getattr(config, name)!r}: that router chooses "
            "in a place of its own, or drops tokens afterwards; run this capture without"
        )
    wrapper = partial(_routing, router, lookup, with_weights, guarded, forced)
    return method_wrapped(router, "routing", wrapper)


def _routing(
    router: Any,
    lookup: Lookup,
    with_weights: bool,
    guarded: Guard,
    forced: Callable[[Choice], None],
    own: Callable[..., Any],
    logits: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    import torch

    what = f"forcing the routes of layer {router.layer_number}, counted from 1"
    choice: Choice | None = None
    with guarded(what):
        given = lookup(logits.shape[:-1].numel())
        if given is not None:
            check_choice(given, experts=logits.shape[-1], slots=router.topk)
        choice = given
    if choice is None or not choice.found.any():
        probs, routed = own(logits, *args, **kwargs)
        return (_wide(probs) if with_weights else probs), routed
    rows = torch.from_numpy(np.flatnonzero(choice.found)).to(logits.device)
    ids = torch.from_numpy(choice.ids[choice.found]).to(logits.device)
    with _chosen(router, rows, ids):
        probs, routed = own(logits, *args, **kwargs)
    if with_weights:
        probs = _wide(probs)
    with guarded(what):
        wanted = torch.zeros_like(routed[: len(rows)]).scatter(1, ids, True)
        if not torch.equal(routed.index_select(0, rows), wanted):
            raise ValueError("the router does not ask its router_replay which experts to choose")
        if with_weights and choice.weights is not None:
            weights = torch.from_numpy(choice.weights[choice.found]).to(probs)
            probs = probs.index_copy(0, rows, probs.index_select(0, rows).scatter(1, ids, weights))
        forced(choice)
    return probs, routed


def _wide(probs: torch.Tensor) -> torch.Tensor:
    import torch

    return probs.to(torch.promote_types(probs.dtype, torch.float32))


@contextmanager
def _chosen(router: Any, rows: torch.Tensor, ids: torch.Tensor) -> Iterator[None]:
    """Answer in place of the router's replay, which is None in most jobs."""
    before = router.router_replay
    router.router_replay = _Replay(before, rows, ids)
    try:
        yield
    finally:
        router.router_replay = before


class _Replay:
    """Stands for Megatron's RouterReplay in one call of a router."""

    def __init__(self, before: Any, rows: torch.Tensor, ids: torch.Tensor) -> None:
        self._before, self._rows, self._ids = before, rows, ids

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the top k of ``scores`` [row, expert], but in the forced rows their experts."""
        assert default_compute_topk is not None
        if self._before is None:
            own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        else:
            own = self._before.get_replay_topk(
                scores, topk, num_groups, group_topk, default_compute_topk
            )
        # a router has no order of slots: what it chose itself stays as it is, to the bit
        chosen = own[1].index_select(0, self._rows)
        other = (chosen.sort(-1).values != self._ids.sort(-1).values).any(-1)
        rows, ids = self._rows[other], self._ids[other]
        # and what it would not have chosen comes in the order in which it would have
        order = scores.index_select(0, rows).gather(1, ids).argsort(-1, descending=True)
        return at_experts(scores, own, rows, ids.gather(1, order))
