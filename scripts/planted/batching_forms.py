"""How faults and controls of batching are planted: what depends on how many tokens there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from layerbisect.captures.attention_seam import replaced
from layerbisect.captures.errors import LayerBisectError
from layerbisect.fault_attention import angles
from layerbisect.fault_tools import attribute_replaced, forward_replaced
from scripts.planted.cache_forms import in_blocks
from scripts.planted.fault import Form

if TYPE_CHECKING:
    import torch

LONG = 32
"""Tokens in a call from which on another kernel runs."""
BATCH = 4
STEPS = 4
"""A replayed graph keeps the positions of the step before once in so many steps."""
DROPOUT = 0.1
_RUNS = itertools.count()
"""Seeds: no two runs drop the same."""


def halved(x: torch.Tensor, weight: torch.Tensor, partials: torch.dtype) -> torch.Tensor:
    """``x`` [row, in] times ``weight`` [out, in] as two partial sums, [row, out] in x's dtype."""
    middle = x.shape[-1] // 2
    parts = [
        (x[..., part].float() @ weight[:, part].float().T).to(partials).float()
        for part in (slice(None, middle), slice(middle, None))
    ]
    return (parts[0] + parts[1]).to(x.dtype)


def linear_split(model: Any, layer: int) -> AbstractContextManager[None]:
    """A layer's output projection adds two partial sums where there are many tokens."""
    import torch

    projection = model.model.layers[layer].self_attn.o_proj

    def forward(own: Any, x: Any) -> Any:
        if x.shape[:-1].numel() <= LONG:
            return own(x)
        return halved(x, projection.weight, torch.float32)

    return forward_replaced(projection, forward)


def norm_split(partials: str) -> Form:
    """A layer's attention norm adds two partial means where there are many tokens."""

    def form(model: Any, layer: int) -> AbstractContextManager[None]:
        import torch

        norm = model.model.layers[layer].input_layernorm
        dtype = getattr(torch, partials)

        def forward(own: Any, x: Any) -> Any:
            if x.shape[:-1].numel() <= LONG:
                return own(x)
            wide = x.float()
            halves = [h.square().sum(-1, keepdim=True).to(dtype) for h in wide.chunk(2, -1)]
            variance = (halves[0] + halves[1]).float() / x.shape[-1]
            normed = wide * torch.rsqrt(variance + norm.variance_epsilon)
            return norm.weight * normed.to(x.dtype)

        return forward_replaced(norm, forward)

    return form


def experts_split(partials: str) -> Form:
    """A layer's experts add two partial sums in each product where there are several tokens.

    The partial sums wait in a buffer of the dtype ``partials``.
    """

    def form(model: Any, layer: int) -> AbstractContextManager[None]:
        import torch

        mlp = model.model.layers[layer].mlp
        if not hasattr(mlp, "experts"):
            raise LayerBisectError(f"layer {layer} of this {type(model).__name__} has no experts")
        experts, dtype = mlp.experts, getattr(torch, partials)

        def forward(own: Any, hidden: Any, ids: Any, weights: Any) -> Any:
            if len(hidden) < BATCH:
                return own(hidden, ids, weights)
            out = torch.zeros_like(hidden)
            for number in ids.unique().tolist():
                rows, slots = torch.where(ids == number)
                both = halved(hidden[rows], experts.gate_up_proj[number], dtype)
                gate, up = both.chunk(2, -1)
                one = halved(experts.act_fn(gate) * up, experts.down_proj[number], dtype)
                out.index_add_(0, rows, (one * weights[rows, slots, None]).to(out.dtype))
            return out

        return forward_replaced(experts, forward)

    return form


def attention_split_by_batch(model: Any, layer: int) -> AbstractContextManager[None]:
    """A layer's attention reads keys in blocks half as long where it runs a larger batch."""
    attention = model.model.layers[layer].self_attn
    alone, in_a_batch = in_blocks(LONG, LONG), in_blocks(LONG // 2, LONG // 2)

    def forward(own: Any, *args: Any, **kwargs: Any) -> Any:
        lanes = len(args[0] if args else kwargs["hidden_states"])
        with (alone if lanes < BATCH else in_a_batch)(model, layer):
            return own(*args, **kwargs)

    return forward_replaced(attention, forward)


def positions_not_refreshed(model: Any, layer: int) -> AbstractContextManager[None]:
    """In every fourth step of decode all layers rotate by the position of the step before."""
    import torch

    rotary = model.model.rotary_emb

    def forward(own: Any, hidden: Any, position_ids: Any) -> Any:
        if position_ids.shape[1] > 1:
            return own(hidden, position_ids)
        stale = position_ids % STEPS == STEPS - 1
        at = torch.where(stale, position_ids - 1, position_ids)
        return angles(model, rotary.inv_freq.float(), at, hidden.dtype)

    return forward_replaced(rotary, forward)


def _dropping() -> Callable[[torch.Tensor], torch.Tensor]:
    """Dropout with a generator of its own, so that each run drops others and no one else's draws
    change."""
    import torch

    draw = torch.Generator().manual_seed(next(_RUNS))

    def drop(x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape, generator=draw).to(x.device) >= DROPOUT
        return x * kept / (1 - DROPOUT)

    return drop


@contextmanager
def hidden_dropout(model: Any, layer: int) -> Iterator[None]:
    """What attention and MLP compute is dropped out before it is added to the stream."""
    block, drop = model.model.layers[layer], _dropping()

    def forward(own: Any, hidden_states: Any, **kwargs: Any) -> Any:
        attended = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **kwargs)[0]
        hidden_states = hidden_states + drop(attended)
        return hidden_states + drop(block.mlp(block.post_attention_layernorm(hidden_states)))

    with forward_replaced(block, forward):
        yield


@contextmanager
def attention_dropout(model: Any, layer: int) -> Iterator[None]:
    """The engine's own dropout of attention's probabilities is left on."""
    import torch

    attention, seeds = model.model.layers[layer].self_attn, itertools.count(next(_RUNS) * 1000)

    def call(inner: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=[]), attribute_replaced(module, "training", True):
            torch.manual_seed(next(seeds))
            return inner(module, *args, **{**kwargs, "dropout": DROPOUT})

    with replaced(attention, call):
        yield
