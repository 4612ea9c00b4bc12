"""Gated feed-forward networks: one for all tokens, or a weighted sum of routed experts.

    mlp(x) = down(silu(gate(x)) * up(x))          (Shazeer 2020, arXiv:2002.05202)
    experts(x) = sum over slots of weight * mlp_of_that_expert(x)

``expert_outputs`` are the terms of that sum, and ``combine`` adds them up.

The low-precision form rounds gate, up, silu, their product and the down projection; each expert's
weighted output; and the sum, in one of these orders, as read in transformers 5.19 and SGLang
0.5.23:

    expert  after every expert, in the order of their numbers: transformers' loop over experts
    slot    after every slot, in the order of the slots
    once    in the order of the slots, and once at the end: SGLang's fused kernels
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch

from layerbisect.kernels.linear import linear
from layerbisect.kernels.rounding import require_compute_dtype, rounded
from layerbisect.kernels.swiglu import swiglu

Order = Literal["expert", "slot", "once"]


class ExpertWeights(Protocol):
    """The weights of all experts, one at a time: a 3-D tensor, or something that reads lazily."""

    def __len__(self) -> int:
        """Return the number of experts."""

    def __getitem__(self, expert: int, /) -> torch.Tensor:
        """Return one expert's matrix."""


def swiglu_mlp(
    x: torch.Tensor,
    gate_w: torch.Tensor,
    up_w: torch.Tensor,
    down_w: torch.Tensor,
    *,
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Apply one gated network to ``x`` [row, hidden], float32 or float64; returns the same shape.

    ``gate_w`` and ``up_w`` are [intermediate, hidden], ``down_w`` is [hidden, intermediate].
    """
    gate = linear(x, gate_w, round_to=round_to)
    up = linear(x, up_w, round_to=round_to)
    return _gated(gate, up, down_w, round_to)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    order: Order = "expert",
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Sum the routed experts of each row.

    ``x`` [row, hidden], float32 or float64; ``ids`` [row, slot] and ``weights`` [row, slot] as
    ``route`` returns them, where an ID of -1 marks an unused slot. ``gate_up[expert]`` is
    [2 * intermediate, hidden], gate above up, and ``down[expert]`` [hidden, intermediate]; only
    experts that a row was routed to are read. ``order`` is that of the sum. Returns [row, hidden].
    Raises TypeError for another dtype and ValueError for shapes that don't fit, an expert that
    doesn't exist or an unknown order.
    """
    require_compute_dtype("x", x)
    require_routed(x, ids, weights, len(gate_up))
    if order != "expert":
        by_slot = x[:, None].expand(-1, ids.shape[1], -1)
        outputs = expert_outputs(by_slot, ids, weights, gate_up, down, round_to=round_to)
        return combine(outputs, ids, order=order, round_to=round_to)
    total = torch.zeros_like(x)
    for expert in _used(ids):
        rows, slots = torch.where(ids == expert)
        weight = weights[rows, slots, None]
        out = _weighted(x[rows], weight, gate_up[expert], down[expert], round_to)
        # an expert that a row names twice must count twice, so no plain indexed assignment
        total.index_add_(0, rows, out)
        if round_to is not None:
            total[rows] = rounded(total[rows], round_to)
    return total


def expert_outputs(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Apply each slot's expert to that slot's own input, and weigh what comes out.

    ``x`` [row, slot, hidden], and all else as ``experts`` takes it, which sums the slots where
    their inputs are the same. Returns [row, slot, hidden], 0 in unused slots.
    """
    require_compute_dtype("x", x)
    require_routed(x, ids, weights, len(gate_up))
    made = torch.zeros_like(x)
    for expert in _used(ids):
        at = torch.where(ids == expert)
        made[at] = _weighted(x[at], weights[at][:, None], gate_up[expert], down[expert], round_to)
    return made


def combine(
    outputs: torch.Tensor,
    ids: torch.Tensor,
    *,
    order: Order = "expert",
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Add up weighted ``outputs`` [row, slot, hidden], float32 or float64: [row, hidden].

    Slots with an ID of -1 in ``ids`` [row, slot] are left out. Raises TypeError for another dtype
    and ValueError for shapes that don't fit or an unknown ``order``.
    """
    require_compute_dtype("outputs", outputs)
    if outputs.shape[:2] != ids.shape:
        raise ValueError(f"ids must have shape {list(outputs.shape[:2])}, got {list(ids.shape)}")
    if order not in get_args(Order):
        raise ValueError(f"order must be 'expert', 'slot' or 'once', got {order!r}")
    total = torch.zeros_like(outputs[:, 0])
    rows = torch.arange(len(ids), device=ids.device)
    slots = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    if order == "expert":
        slots = ids.argsort(dim=1, stable=True)
    every = None if order == "once" else round_to
    for slot in slots.unbind(1):
        used = ids[rows, slot] >= 0
        total[used] = rounded(total[used] + outputs[rows[used], slot[used]], every)
    return rounded(total, round_to)


def require_routed(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, count: int) -> None:
    """Raise ValueError unless ``ids`` and ``weights`` fit ``x`` and name experts of ``count``."""
    given = x.shape[:-1]
    if ids.shape != weights.shape or ids.ndim != 2 or ids.shape[: len(given)] != given:
        wanted = ", ".join(map(str, (*given, "slot")[:2]))
        raise ValueError(
            f"ids and weights must both have shape [{wanted}], "
            f"got {list(ids.shape)} and {list(weights.shape)}"
        )
    if ids.numel() and (int(ids.max()) >= count or int(ids.min()) < -1):
        raise ValueError(f"expert IDs must lie in [-1, {count}), got {ids.min()} to {ids.max()}")


def _used(ids: torch.Tensor) -> list[int]:
    used: list[int] = torch.unique(ids[ids >= 0]).tolist()
    return used


def _weighted(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    round_to: torch.dtype | None,
) -> torch.Tensor:
    gate, up = linear(x, gate_up, round_to=round_to).chunk(2, dim=-1)
    return rounded(_gated(gate, up, down, round_to) * weight.to(x.dtype), round_to)


def _gated(
    gate: torch.Tensor, up: torch.Tensor, down_w: torch.Tensor, round_to: torch.dtype | None
) -> torch.Tensor:
    return linear(swiglu(gate, up, round_to=round_to), down_w, round_to=round_to)
