"""Faults that come in sizes, for the detection curve: from plain to see to far below rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from layerbisect.captures.attention_seam import replaced
from layerbisect.fault_attention import angles, rotated
from layerbisect.fault_tools import attribute_replaced, forward_replaced, parameter_replaced
from scripts.planted.fault import ModelFault

SIZES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)
Sized = Callable[[Any, int, float], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class SizedFault:
    """A fault whose form also takes a size; the rest as in `ModelFault`."""

    name: str
    operator: str
    point: str
    form: Sized
    description: str
    dense: str | None = ""
    none: bool = False

    def of(self, size: float) -> ModelFault:
        """The fault of one size."""
        sized = self.form

        def form(model: Any, layer: int) -> AbstractContextManager[None]:
            return sized(model, layer, size)

        return ModelFault(
            name=f"{self.name} {size:g}",
            component="size",
            operator=self.operator,
            point=self.point,
            form=form,
            reports=(),
            description=self.description,
            dense=self.dense,
            layers="none" if self.none else "each",
        )


def _scaled_weight(owner: Callable[[Any, int], Any], rows: slice = slice(None)) -> Sized:
    """Multiply what a module puts out by 1 + size before it is rounded.

    The weight is scaled in float32 and the product is taken in it, so that the fault is the gain
    alone and not another rounding of the weight.
    """

    def form(model: Any, layer: int, size: float) -> AbstractContextManager[None]:
        import torch

        module = owner(model, layer)

        def forward(own: Any, hidden: Any, *args: Any) -> Any:
            factor = torch.ones(module.weight.shape[0])
            factor[rows] += size
            wide = torch.nn.functional.linear(hidden.float(), module.weight.float())
            return (wide * factor).to(hidden.dtype)

        return forward_replaced(module, forward)

    return form


def norm_gain(model: Any, layer: int, size: float) -> AbstractContextManager[None]:
    """Scale a norm's output by 1 + size before it is rounded."""
    norm = model.model.layers[layer].post_attention_layernorm

    def forward(own: Any, hidden: Any) -> Any:
        wide = hidden.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        return (norm.weight.float() * wide * (1 + size)).to(hidden.dtype)

    return forward_replaced(norm, forward)


def norm_eps(model: Any, layer: int, size: float) -> AbstractContextManager[None]:
    """Add ``size`` to the norm's eps."""
    norm = model.model.layers[layer].input_layernorm
    return attribute_replaced(norm, "variance_epsilon", norm.variance_epsilon + size)


def softmax_scale(model: Any, layer: int, size: float) -> AbstractContextManager[None]:
    """Multiply attention's scale by 1 + size."""
    attention = model.model.layers[layer].self_attn
    return attribute_replaced(attention, "scaling", attention.scaling * (1 + size))


def value_head_gain(model: Any, layer: int, size: float) -> AbstractContextManager[None]:
    """Scale what one head puts out by 1 + size."""
    import torch

    def call(inner: Any, module: Any, q: Any, k: Any, v: Any, *a: Any, **kw: Any) -> Any:
        context, weights = inner(module, q.float(), k.float(), v.float(), *a, **kw)
        factor = torch.ones(context.shape[2])
        factor[0] += size
        return (context * factor[:, None]).to(q.dtype), weights

    return replaced(model.model.layers[layer].self_attn, call)


def rope_angle(model: Any, layer: int, size: float) -> AbstractContextManager[None]:
    """Turn queries by 1 + size times their angle, keys rightly."""
    frequencies = model.model.rotary_emb.inv_freq.float()

    def rotate(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        turned = angles(model, frequencies * (1 + size), positions, cos.dtype)
        return own(q, k, *turned)[0], own(q, k, cos, sin)[1]

    return rotated(model, layer, rotate)


@contextmanager
def experts_gain(model: Any, layer: int, size: float) -> Iterator[None]:
    """Scale what all experts put out by 1 + size, before it is rounded."""
    experts = model.model.layers[layer].mlp.experts
    wide = experts.down_proj.detach().float() * (1 + size)

    def forward(own: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        # in float32 throughout, and rounded once
        up = experts.gate_up_proj.detach().float()
        with (
            parameter_replaced(experts, "down_proj", wide),
            parameter_replaced(experts, "gate_up_proj", up),
        ):
            return own(hidden.float(), ids, weights.float()).to(hidden.dtype)

    with forward_replaced(experts, forward):
        yield


def router_gain(model: Any, layer: int, size: float) -> AbstractContextManager[None]:
    """Scale the router's logits by 1 + size before they are rounded; the rest follows."""
    import torch

    gate = model.model.layers[layer].mlp.gate

    def forward(own: Any, hidden: Any) -> Any:
        wide = torch.nn.functional.linear(hidden.float(), gate.weight.float()) * (1 + size)
        logits = wide.to(hidden.dtype)
        chosen, ids = logits.float().softmax(-1).topk(gate.top_k, -1)
        if gate.norm_topk_prob:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return logits, chosen.to(logits.dtype), ids

    return forward_replaced(gate, forward)


SIZED: tuple[SizedFault, ...] = (
    SizedFault(
        "output projection x (1 + size)",
        "linear",
        "attn.out",
        _scaled_weight(lambda model, layer: model.model.layers[layer].self_attn.o_proj),
        "the output projection's result is too large",
    ),
    SizedFault(
        "one channel of the output projection x (1 + size)",
        "linear",
        "attn.out",
        _scaled_weight(
            lambda model, layer: model.model.layers[layer].self_attn.o_proj, slice(5, 6)
        ),
        "one channel of the output projection's result is too large",
    ),
    SizedFault("norm x (1 + size)", "norm", "mlp.norm", norm_gain, "the MLP norm is too large"),
    SizedFault("norm's eps + size", "norm", "attn.norm", norm_eps, "the norm's eps is larger"),
    SizedFault(
        "softmax scale x (1 + size)",
        "attention",
        "attn.context",
        softmax_scale,
        "attention's scale is too large",
    ),
    SizedFault(
        "one head x (1 + size)",
        "attention",
        "attn.context",
        value_head_gain,
        "what one head puts out is too large",
    ),
    SizedFault(
        "query angle x (1 + size)",
        "rope",
        "attn.q",
        rope_angle,
        "queries are turned too far",
    ),
    SizedFault(
        "router logits x (1 + size)",
        "router",
        "mlp.router_logits",
        router_gain,
        "the router's logits are too large",
        dense=None,
    ),
    SizedFault(
        "experts x (1 + size)",
        "experts",
        "mlp.out",
        experts_gain,
        "what the experts put out is too large",
        dense=None,
    ),
    SizedFault(
        "logits x (1 + size)",
        "head",
        "logits",
        _scaled_weight(lambda model, layer: model.lm_head),
        "the head's logits are too large",
        none=True,
    ),
)
