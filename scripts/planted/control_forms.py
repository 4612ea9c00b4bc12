"""Harmless forms of what is no attention and no expert: sums in other orders, wider numbers.

All forms are of every layer and ignore the layer's number. Each computes the same function as the
engine, rounds it to the engine's dtype where the engine does or later, and never earlier.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from layerbisect.captures.errors import LayerBisectError
from layerbisect.fault_tools import attribute_replaced, forward_replaced
from scripts.planted.fault import Form

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From rows [..., in] and a weight [out, in] in the engine's dtype to [..., out]."""


def linears_of(model: Any) -> list[Any]:
    """The projections of all layers: attention's, and those of dense MLPs."""
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return [
        module
        for name, module in model.model.layers.named_modules()
        if name.rpartition(".")[2] in kinds and isinstance(module, torch.nn.Linear)
    ]


def replaced_all(modules: list[Any], forward: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let ``forward(module, own, *args)`` compute each of some modules."""
    return _all([forward_replaced(module, partial(forward, module)) for module in modules])


@contextmanager
def _all(contexts: list[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield


def _linear(compute: Linear, module: Any, own: Any, hidden: torch.Tensor) -> torch.Tensor:
    out = compute(hidden, module.weight)
    if module.bias is not None:
        out = out + module.bias.to(out.dtype)
    return out.to(hidden.dtype)


def linears(compute: Linear) -> Form:
    """Compute all projections by ``compute``, whose result is rounded once."""
    return lambda model, layer: replaced_all(linears_of(model), partial(_linear, compute))


def head(compute: Linear) -> Form:
    """Compute the head by ``compute``, whose result is rounded once."""
    return lambda model, layer: replaced_all([model.lm_head], partial(_linear, compute))


def routers(compute: Linear) -> Form:
    """Compute the router logits by ``compute``, whose result is rounded once."""

    def form(model: Any, layer: int) -> AbstractContextManager[None]:
        gates = [b.mlp.gate for b in model.model.layers if hasattr(b.mlp, "experts")]
        if not gates:
            raise LayerBisectError("the model has no router")
        return _all([forward_replaced(gate, partial(_routed, gate, compute)) for gate in gates])

    return form


def _routed(gate: Any, compute: Linear, own: Any, hidden: torch.Tensor) -> Any:
    rows = hidden.reshape(-1, gate.hidden_dim)
    logits = compute(rows, gate.weight).to(hidden.dtype)
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(gate.top_k, -1)
    if gate.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(logits.dtype), ids


def in_parts(parts: int) -> Linear:
    """Sum over the input in so many parts, each accumulated in float32, and add them up so."""

    def compute(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        pairs = zip(hidden.float().chunk(parts, -1), weight.float().chunk(parts, -1), strict=True)
        return sum((x @ w.T for x, w in pairs), torch.zeros(()))

    return compute


def backwards(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sum over the input from its last channel to its first, in float32."""
    return hidden.float().flip(-1) @ weight.float().flip(-1).T


def exact(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sum over the input in float64."""
    return hidden.double() @ weight.double().T


def by_column_shards(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute two halves of the outputs apart, as ranks with half of the columns do."""
    return torch.cat([torch.nn.functional.linear(hidden, w) for w in weight.chunk(2)], -1)


def transposed(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply the weight by the rows, another kernel's order."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    return (weight @ rows.T).T.reshape(*hidden.shape[:-1], -1)


def norms(root: Callable[[torch.Tensor, float], torch.Tensor]) -> Form:
    """Compute all RMSNorms with ``root(hidden in float32, eps)`` for one over the root."""

    def normed(module: Any, own: Any, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        scaled = wide * root(wide, module.variance_epsilon)
        return torch.as_tensor(module.weight * scaled.to(hidden.dtype))

    def form(model: Any, layer: int) -> AbstractContextManager[None]:
        found = [m for m in model.model.modules() if hasattr(m, "variance_epsilon")]
        return replaced_all(found, normed)

    return form


def mean_by_halves(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """One over the root of the mean square, summed from strided channels in float32."""
    squares = hidden.square()
    total = squares[..., ::2].sum(-1, keepdim=True) + squares[..., 1::2].sum(-1, keepdim=True)
    return torch.rsqrt(total / hidden.shape[-1] + eps)


def mean_in_float64(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """The same from a sum in float64."""
    return (hidden.double().square().mean(-1, keepdim=True) + eps).rsqrt().float()


def divided_by_root(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """The same by a root and a division, and from a norm instead of a mean."""
    size = hidden.norm(dim=-1, keepdim=True)
    return torch.reciprocal(torch.sqrt(size.square() / hidden.shape[-1] + eps))


def wide_residual(model: Any, layer: int) -> AbstractContextManager[None]:
    """Keep the residual stream in float32; what is added to it, and what norms give, is not."""
    dtype = model.dtype

    def block_forward(block: Any, own: Any, hidden: torch.Tensor, **kwargs: Any) -> Any:
        wide = hidden.float()
        attended, _ = block.self_attn(hidden_states=block.input_layernorm(wide), **kwargs)
        wide = wide + attended
        return wide + block.mlp(block.post_attention_layernorm(wide))

    def narrow(module: Any, own: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(own(hidden)).to(dtype)

    blocks = list(model.model.layers)
    ends = [n for b in blocks for n in (b.input_layernorm, b.post_attention_layernorm)]
    return _all(
        [replaced_all(blocks, block_forward), replaced_all([*ends, model.model.norm], narrow)]
    )


def rope(dtype: torch.dtype, *, rounded: bool) -> Form:
    """Compute the angles, their cosines and sines in ``dtype``; rotate in float32, and round once.

    Cosines and sines are ``rounded`` to the engine's dtype as the engine's own are, or not.
    """

    def form(model: Any, layer: int) -> AbstractContextManager[None]:
        rotary = model.model.rotary_emb
        source = sys.modules[type(model.model.layers[0].self_attn).__module__]
        own_rotation = source.apply_rotary_pos_emb

        def angles(own: Any, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
            half = position_ids[..., None].to(dtype) * rotary.inv_freq.to(dtype)
            angle = torch.cat((half, half), -1)
            scaled = [f(angle) * rotary.attention_scaling for f in (torch.cos, torch.sin)]
            return tuple(s.to(hidden.dtype if rounded else torch.float32) for s in scaled)

        def rotation(q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **more: Any) -> Any:
            wide = own_rotation(q.float(), k.float(), cos.float(), sin.float(), *rest, **more)
            return tuple(one.to(q.dtype) for one in wide)

        return _all(
            [
                forward_replaced(rotary, angles),
                attribute_replaced(source, "apply_rotary_pos_emb", rotation),
            ]
        )

    return form


@contextmanager
def without_onednn(model: Any, layer: int) -> Iterator[None]:
    """Let torch multiply by its own kernels and not oneDNN's."""
    change: Any = torch.backends.mkldnn.set_flags
    enabled, *_ = change(False)
    try:
        yield
    finally:
        change(enabled)


@contextmanager
def with_gradients(model: Any, layer: int) -> Iterator[None]:
    """Record what a backward would need, as a training forward does."""
    with torch.enable_grad():
        yield


def together(*forms: Form) -> Form:
    """Several forms at once."""
    return lambda model, layer: _all([form(model, layer) for form in forms])
