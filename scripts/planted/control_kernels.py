"""Harmless forms of attention and of experts: other orders, blocks and precisions of their sums.

All forms are of every layer and ignore the layer's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from layerbisect.captures.errors import LayerBisectError
from layerbisect.fault_tools import forward_replaced
from scripts.planted.attending import Attention, Change, at_attention
from scripts.planted.fault import Form

BLOCK = 16
"""Keys that a blockwise attention reads at once."""


def attention(change: Change) -> Form:
    """Let ``change`` compute the context of every layer."""
    form = at_attention(change)

    def every(model: Any, layer: int) -> AbstractContextManager[None]:
        return _all([form(model, number) for number in range(len(model.model.layers))])

    return every


@contextmanager
def _all(contexts: list[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield


def online(call: Attention) -> torch.Tensor:
    """Go through the keys in blocks with a running maximum, as flash attention does."""
    scores = call.scores()
    top = torch.full_like(scores[..., :1], float("-inf"))
    total = torch.zeros_like(top)
    context: torch.Tensor | None = None
    for start in range(0, call.keys, BLOCK):
        keys = slice(start, min(start + BLOCK, call.keys))
        higher = torch.maximum(top, scores[..., keys].amax(-1, keepdim=True))
        # a padded row may see nothing yet
        safe = higher.masked_fill(higher == float("-inf"), 0.0)
        weights = (scores[..., keys] - safe).exp()
        kept = (top - safe).exp()
        total = total * kept + weights.sum(-1, keepdim=True)
        part = call.summed(weights, keys)
        context = part if context is None else context * kept.transpose(1, 2) + part
        top = higher
    assert context is not None
    return context / total.transpose(1, 2).clamp_min(1e-30)


def keys_backwards(call: Attention) -> torch.Tensor:
    """Sum over the keys from the last to the first, in float32."""
    weights = _softmax(call.scores().flip(-1)).flip(-1)
    return _backwards(call, weights)


def _backwards(call: Attention, weights: torch.Tensor) -> torch.Tensor:
    halves = [slice(call.keys // 2, call.keys), slice(0, call.keys // 2)]
    first, second = (call.summed(weights[..., keys], keys) for keys in halves)
    return first + second


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    # a padded row sees nothing, and nobody reads what it gives
    return scores.softmax(-1).nan_to_num(0.0)


def base_two(call: Attention) -> torch.Tensor:
    """Take the softmax to base two, with the factor in the scores."""
    scores = call.scores() * 1.4426950408889634
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True)).nan_to_num(0.0)
    return call.summed(weights / weights.sum(-1, keepdim=True).clamp_min(1e-30))


def unnormalised(call: Attention) -> torch.Tensor:
    """Sum the values by exponentials, and divide the sum at last."""
    scores = call.scores()
    weights = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0.0)
    total = weights.sum(-1, keepdim=True).transpose(1, 2)
    return call.summed(weights) / total.clamp_min(1e-30)


def scaled_queries(call: Attention) -> torch.Tensor:
    """Scale the queries and not the scores, in float32."""
    wide = call.q.float() * call.scaling
    keys = call.k.float().repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    scores = (wide @ keys.mT).masked_fill(~call.allowed(), float("-inf"))
    return call.summed(_softmax(scores))


def in_float64(call: Attention) -> torch.Tensor:
    """Compute scores, softmax and sums in float64."""
    group = call.q.shape[1] // call.k.shape[1]
    keys, values = (one.double().repeat_interleave(group, 1) for one in (call.k, call.v))
    scores = call.q.double() @ keys.mT * call.scaling
    weights = _softmax(scores.masked_fill(~call.allowed(), float("-inf")))
    return (weights @ values).transpose(1, 2)


Order = Callable[[int], list[int]]


def forwards(count: int) -> list[int]:
    """From the first expert to the last."""
    return list(range(count))


def experts(
    order: Order = forwards,
    *,
    parts: int = 1,
    wide: bool = False,
) -> Form:
    """Compute all experts, and add their outputs up in float32, in some ``order`` of experts.

    The down projection is summed in ``parts``. Inside an expert the engine's dtype is rounded to as
    the engine does, or, where it is ``wide``, before the down projection alone.
    """
    forward = partial(_experts, order=order, parts=parts, wide=wide)

    def form(model: Any, layer: int) -> AbstractContextManager[None]:
        return _every(model, forward)

    return form


def _every(model: Any, forward: Callable[..., torch.Tensor]) -> AbstractContextManager[None]:
    found = [b.mlp.experts for b in model.model.layers if hasattr(b.mlp, "experts")]
    if not found:
        raise LayerBisectError("the model has no experts")
    return _all([forward_replaced(one, partial(forward, one)) for one in found])


def _experts(
    module: Any,
    own: Any,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    order: Order,
    parts: int,
    wide: bool,
) -> torch.Tensor:
    out = torch.zeros(hidden.shape, dtype=torch.float32)
    for number in order(module.num_experts):
        token, slot = torch.where(ids == number)
        if not len(token):
            continue
        rows, gate_up = hidden[token], module.gate_up_proj[number]
        both = linear(rows.float(), gate_up.float()) if wide else linear(rows, gate_up)
        gate, up = both.chunk(2, -1)
        inner = (module.act_fn(gate) * up).to(hidden.dtype)
        pairs = zip(
            inner.float().chunk(parts, -1),
            module.down_proj[number].float().chunk(parts, -1),
            strict=True,
        )
        down = sum((linear(x, w) for x, w in pairs), torch.zeros(()))
        out.index_add_(0, token, down * weights[token, slot, None].float())
    return out.to(hidden.dtype)


def backwards(count: int) -> list[int]:
    """From the last expert to the first."""
    return list(range(count - 1, -1, -1))


class AnyOrder:
    """Another order at each call, as where experts are added by atomic operations."""

    def __init__(self) -> None:
        self._draw = torch.Generator().manual_seed(0)

    def __call__(self, count: int) -> list[int]:
        """Draw an order of so many experts."""
        order: list[int] = torch.randperm(count, generator=self._draw).tolist()
        return order


def all_experts(model: Any, layer: int) -> AbstractContextManager[None]:
    """Run every token through every expert, with weight 0 where it was not sent."""
    return _every(model, _dense)


def _dense(
    module: Any, own: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    spread = torch.zeros(len(hidden), module.num_experts, dtype=torch.float32)
    spread.scatter_(1, ids, weights.float())
    gate, up = torch.einsum("th,eih->tei", hidden, module.gate_up_proj).chunk(2, -1)
    inner = module.act_fn(gate) * up
    down = torch.einsum("tei,ehi->teh", inner, module.down_proj)
    return (down.float() * spread[..., None]).sum(1).to(hidden.dtype)


def fused_swiglu(model: Any, layer: int) -> AbstractContextManager[None]:
    """SwiGLU in one kernel: gate, activation and product are rounded once, in experts too."""

    def dense(mlp: Any, own: Any, hidden: torch.Tensor) -> Any:
        gate, up = mlp.gate_proj(hidden).float(), mlp.up_proj(hidden).float()
        return mlp.down_proj((mlp.act_fn(gate) * up).to(hidden.dtype))

    sparse = partial(_experts, order=forwards, parts=1, wide=True)
    return _all(
        [
            forward_replaced(block.mlp.experts, partial(sparse, block.mlp.experts))
            if hasattr(block.mlp, "experts")
            else forward_replaced(block.mlp, partial(dense, block.mlp))
            for block in model.model.layers
        ]
    )


def silu_by_tanh(model: Any, layer: int) -> AbstractContextManager[None]:
    """SiLU by a hyperbolic tangent, in float32, rounded once."""

    def forward(own: Any, gate: torch.Tensor) -> torch.Tensor:
        wide = gate.float()
        return (wide * (0.5 + 0.5 * torch.tanh(0.5 * wide))).to(gate.dtype)

    owners = [getattr(block.mlp, "experts", block.mlp) for block in model.model.layers]
    return _all([forward_replaced(owner.act_fn, forward) for owner in owners])
