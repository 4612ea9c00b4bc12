"""Faults inside a layer's attention, as :mod:`layerbisect.fault_forms` has the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from layerbisect.captures.attention_seam import replaced
from layerbisect.captures.errors import LayerBisectError
from layerbisect.fault_tools import attribute_replaced, forward_replaced

if TYPE_CHECKING:
    import torch

SOFTMAX_SCALE = 1.03


@contextmanager
def qk_norm_skipped(model: Any, layer: int) -> Iterator[None]:
    attention = model.model.layers[layer].self_attn
    with forward_replaced(attention.q_norm, _skip), forward_replaced(attention.k_norm, _skip):
        yield


def _skip(own: Any, hidden: Any) -> Any:
    return hidden


@contextmanager
def rope_base(model: Any, layer: int) -> Iterator[None]:
    import torch

    base = float(model.config.rope_parameters["rope_theta"])
    # the library's default where the model has another, and else what Qwen3 has
    wrong = 1e4 if base > 1e4 else 1e6
    inv_freq = model.model.rotary_emb.inv_freq
    exponent = torch.arange(len(inv_freq), device=inv_freq.device) / len(inv_freq)
    frequencies = inv_freq.float() * (base / wrong) ** exponent

    def rotate(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        return own(q, k, *angles(model, frequencies, positions, cos.dtype))

    with rotated(model, layer, rotate):
        yield


@contextmanager
def rope_shifted(model: Any, layer: int) -> Iterator[None]:
    frequencies = model.model.rotary_emb.inv_freq.float()

    def rotate(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        # shifting q and k alike would change nothing, for only distances count
        shifted = angles(model, frequencies, positions + 1, cos.dtype)
        return own(q, k, *shifted)[0], own(q, k, cos, sin)[1]

    with rotated(model, layer, rotate):
        yield


def angles(model: Any, frequencies: Any, positions: Any, dtype: Any) -> Any:
    """Cosine and sine as the model's own rotary embedding makes them."""
    import torch

    half = positions[..., None].float() * frequencies
    angle = torch.cat((half, half), dim=-1)
    scaling = model.model.rotary_emb.attention_scaling
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


def rotated(model: Any, layer: int, rotate: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let ``rotate(own, q, k, cos, sin, positions)`` apply RoPE in one layer."""
    attention = model.model.layers[layer].self_attn
    # the attention calls a function of its own source file
    source = sys.modules[type(attention).__module__]

    def forward(own: Any, *args: Any, **kwargs: Any) -> Any:
        apply = source.apply_rotary_pos_emb
        positions = kwargs["position_ids"]

        def applied(q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **more: Any) -> Any:
            return rotate(apply, q, k, cos, sin, positions)

        with attribute_replaced(source, "apply_rotary_pos_emb", applied):
            return own(*args, **kwargs)

    return forward_replaced(attention, forward)


def softmax_scale(model: Any, layer: int) -> AbstractContextManager[None]:
    attention = model.model.layers[layer].self_attn
    return attribute_replaced(attention, "scaling", attention.scaling * SOFTMAX_SCALE)


def mask_off_by_one(model: Any, layer: int) -> AbstractContextManager[None]:
    implementation = model.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise LayerBisectError(
            f"mask-off-by-one needs attention that takes a mask, not {implementation!r}; "
            "load the model with attn_implementation='sdpa' or 'eager'"
        )

    def call(inner: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        return inner(module, q, k, v, _without_newest(q, k, mask), **kwargs)

    return replaced(model.model.layers[layer].self_attn, call)


def _without_newest(query: torch.Tensor, key: torch.Tensor, mask: Any) -> torch.Tensor:
    """A mask that also hides each token from itself, unless it sees nothing else."""
    import torch

    rows, columns = query.shape[2], key.shape[2]
    ones = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
    own = columns - rows
    if mask is None:
        allowed = ones.tril(own)[None, None]
    else:
        allowed = mask if mask.dtype == torch.bool else mask >= 0
    itself = ones.tril(own) & ones.triu(own)
    fewer = allowed & ~itself
    allowed = torch.where(fewer.any(-1, keepdim=True), fewer, allowed)
    hidden = torch.finfo(query.dtype).min
    return torch.zeros(allowed.shape, dtype=query.dtype, device=query.device).masked_fill(
        ~allowed, hidden
    )


def kv_heads_regrouped(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    if kv_heads in (1, heads):
        raise LayerBisectError(
            f"kv-heads-regrouped needs several KV heads that are shared; "
            f"the model has {heads} heads and {kv_heads} KV heads"
        )
    # head h reads KV head h % kv_heads instead of h // group: put it where that one is read
    group = heads // kv_heads
    place = torch.tensor([h % kv_heads * group + h // kv_heads for h in range(heads)])

    def call(inner: Any, module: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        slots = place.to(q.device)
        context, weights = inner(module, q[:, slots.argsort()], *args, **kwargs)
        return context[:, :, slots], weights

    return replaced(model.model.layers[layer].self_attn, call)


def o_proj_permuted(model: Any, layer: int) -> AbstractContextManager[None]:
    attention = model.model.layers[layer].self_attn
    if model.config.num_attention_heads < 2:
        raise LayerBisectError("o-proj-permuted swaps two heads; the model has one")

    def forward(own: Any, context: Any) -> Any:
        heads = context.unflatten(-1, (-1, attention.head_dim))
        order = [1, 0, *range(2, heads.shape[-2])]
        return own(heads[..., order, :].flatten(-2))

    return forward_replaced(attention.o_proj, forward)
