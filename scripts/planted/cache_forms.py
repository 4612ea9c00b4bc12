"""How faults of the KV cache are planted: attention reads keys and values that are not its own.

What a layer projects for new tokens stays right, and attention finds something else beside it: so
the first wrong point is ``attn.context``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from layerbisect.captures.attention_seam import replaced
from layerbisect.fault_tools import forward_replaced
from scripts.planted.fault import Form
from scripts.planted.packing_forms import visible

if TYPE_CHECKING:
    import torch

CACHED = 6
"""Tokens of a prompt that a prefix cache held before; the prompts of a scene are longer."""
OLD_NOISE = 0.1
"""How far old weights are off, relative."""
SEVERAL_AGES = tuple(0.01 * age**0.5 for age in (17, 9, 1))
"""The same of each third of the prefix: a hundredth an update, which add up as a random walk."""
FP8_MAX = 448.0
LARGE_KEYS, SMALL_VALUES = 200.0, 2.0**-7
"""How much larger or smaller than the small model's those are that e4m3 cannot hold at scale 1."""
TILE = 32
DRAFTS_FROM = 61
"""The scene's sequences are 64 tokens; drafts of three tokens do not fit behind this position."""
WARM = 16
"""Tokens in the cached prefix behind which attention is computed in blocks."""
Keys = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], tuple[Any, Any]]
"""From q, k and v ([lane, head, position, channel]) to the keys and values that are read."""


def stale_prefix(noise_of: tuple[float, ...]) -> Form:
    """The first tokens' keys and values come from weights before as many updates.

    ``noise_of`` has for each part of the cached prefix how far its weights were off.
    """

    @contextmanager
    def form(model: Any, layer: int) -> Iterator[None]:
        import torch

        attention = model.model.layers[layer].self_attn
        source = sys.modules[type(attention).__module__]
        old: list[torch.Tensor] = []

        def project(hidden: torch.Tensor, cos: Any, sin: Any) -> tuple[Any, Any]:
            size = CACHED // len(noise_of)
            parts: list[tuple[torch.Tensor, torch.Tensor]] = []
            for number, noise in enumerate(noise_of):
                part = hidden[:, number * size : (number + 1) * size]
                k, v = (
                    torch.nn.functional.linear(part, _old_weight(own.weight, noise, seed), own.bias)
                    for seed, own in (
                        (2 * number, attention.k_proj),
                        (2 * number + 1, attention.v_proj),
                    )
                )
                parts.append((k, v))
            shape = (len(hidden), CACHED, -1, attention.head_dim)
            keys, values = (torch.cat(p, 1).view(shape) for p in zip(*parts, strict=True))
            keys = getattr(attention, "k_norm", torch.nn.Identity())(keys).transpose(1, 2)
            turned = source.apply_rotary_pos_emb(keys, keys, cos[:, :CACHED], sin[:, :CACHED])[1]
            return turned, values.transpose(1, 2)

        def forward(own: Any, *args: Any, **kwargs: Any) -> Any:
            if int(kwargs["position_ids"][0, 0]) == 0:
                hidden = args[0] if args else kwargs["hidden_states"]
                old[:] = project(hidden[:, :CACHED], *kwargs["position_embeddings"])
            return own(*args, **kwargs)

        def call(inner: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
            keys, values = (
                torch.cat((was, now[:, :, CACHED:]), 2)
                for was, now in zip(old, (k, v), strict=True)
            )
            context = inner(module, q, keys, values, mask, **kwargs)[0]
            if q.shape[2] == k.shape[2]:
                # the cached tokens themselves were not computed again
                right = inner(module, q, k, v, mask, **kwargs)[0]
                context = torch.cat((right[:, :CACHED], context[:, CACHED:]), 1)
            return context, None

        with forward_replaced(attention, forward), replaced(attention, call):
            yield

    return form


def _old_weight(weight: torch.Tensor, noise: float, seed: int) -> torch.Tensor:
    import torch

    draw = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    return (weight.detach().float() * (1 + noise * draw.to(weight.device))).to(weight.dtype)


def everywhere(form: Form) -> Form:
    """The same fault in every layer at once."""

    @contextmanager
    def planted(model: Any, layer: int) -> Iterator[None]:
        with ExitStack() as stack:
            for number in range(model.config.num_hidden_layers):
                stack.enter_context(form(model, number))
            yield

    return planted


def read_as(change: Keys) -> Form:
    """Let attention read changed keys and values."""

    def form(model: Any, layer: int) -> AbstractContextManager[None]:
        def call(inner: Any, module: Any, q: Any, k: Any, v: Any, *args: Any, **more: Any) -> Any:
            return inner(module, q, *change(q, k, v), *args, **more)

        return replaced(model.model.layers[layer].self_attn, call)

    return form


def fp8(x: torch.Tensor, unit: float | torch.Tensor) -> torch.Tensor:
    """Store ``x`` as e4m3 in units of ``unit`` and read it again; what is too large saturates."""
    import torch

    stored = (x.float() / unit).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (stored.float() * unit).to(x.dtype)


def saturated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, Any]:
    # decode reads the cache, a prefill what it has just computed
    return (k, v) if q.shape[2] > 1 else (fp8(k, 1 / LARGE_KEYS), fp8(v, _amax(v)))


def underflown(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, Any]:
    return fp8(k, _amax(k)), fp8(v, 1 / SMALL_VALUES)


def _amax(x: torch.Tensor) -> torch.Tensor:
    """The unit in which the largest value is e4m3's largest."""
    return x.float().abs().amax() / FP8_MAX


def tiles_in_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, Any]:
    import torch

    whole = (k.shape[2] - 1) // TILE * TILE
    if q.shape[2] > 1 or not whole:
        return k, v
    keys, values = (torch.cat((fp8(x[:, :, :whole], _amax(x)), x[:, :, whole:]), 2) for x in (k, v))
    return keys, values


def drafts_read(first: int) -> Form:
    """From position ``first`` on, the state is that of the token before: a draft left behind."""

    def change(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, Any]:
        import torch

        columns = torch.arange(k.shape[2], device=k.device)
        columns = torch.where(columns >= first, columns - 1, columns)
        return k[:, :, columns], v[:, :, columns]

    return read_as(change)


def drafts_fed(first: int) -> Form:
    """From position ``first`` on, decode is fed the token before the one that was sampled."""

    @contextmanager
    def form(model: Any, layer: int) -> Iterator[None]:
        import torch

        fed: list[torch.Tensor] = []

        def inner(own: Any, *args: Any, **kwargs: Any) -> Any:
            fed[:] = [kwargs["position_ids"]]
            return own(*args, **kwargs)

        last: list[torch.Tensor] = []

        def embed(own: Any, ids: Any) -> Any:
            if ids.shape[1] > 1:
                last[:] = [ids[:, -1:]]
                return own(ids)
            stale = torch.where(fed[0] >= first, last[0], ids)
            last[:] = [ids]
            return own(stale)

        with (
            forward_replaced(model.model, inner),
            forward_replaced(model.model.embed_tokens, embed),
        ):
            yield

    return form


def in_blocks(first: int, size: int | None, partials: str | None = None) -> Form:
    """Attention over blocks of keys, merged by their log-sum-exp, as after a hit in the cache.

    ``first`` is the length of the first block, ``size`` that of the others (None: all the rest);
    ``partials`` is the dtype of a block's own output, where it is not the model's.
    """

    def form(model: Any, layer: int) -> AbstractContextManager[None]:
        import torch

        def call(inner: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
            if k.shape[2] <= first:
                return inner(module, q, k, v, mask, **more)
            whole = inner(module, q, k, v, mask, **more)[0]
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).float() for x in (k, v))
            scores = q.float() @ k.transpose(2, 3) * module.scaling
            scores = scores.masked_fill(~visible(q, k, mask), torch.finfo(torch.float32).min)
            dtype = getattr(torch, partials) if partials else q.dtype
            outputs, sizes = [], []
            lengths = (first, k.shape[2] - first)
            for s, values in zip(
                _pieces(scores, lengths, size, 3), _pieces(v, lengths, size, 2), strict=True
            ):
                outputs.append((s.softmax(-1) @ values).to(dtype).float())
                sizes.append(s.logsumexp(-1))
            shares = torch.stack(sizes).softmax(0)[..., None]
            context = (torch.stack(outputs) * shares).sum(0).to(q.dtype)
            # the cached tokens themselves were computed in one block
            cold = max(first - (k.shape[2] - q.shape[2]), 0)
            return torch.cat((whole[:, :cold], context.transpose(1, 2)[:, cold:]), 1), None

        return replaced(model.model.layers[layer].self_attn, call)

    return form


def _pieces(
    x: torch.Tensor, lengths: tuple[int, int], size: int | None, dim: int
) -> list[torch.Tensor]:
    head, rest = x.split(lengths, dim)
    return [head, *rest.split(size or lengths[1], dim)]
