"""Faults to plant: what goes wrong in engines, with what a verdict on each must say.

::

    with plant(model, "softmax-scale", layer=9):
        with layerbisect.capture(model, "captures/rollout", label="rollout"):
            model(input_ids=ids)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerbisect import fault_attention as attention
from layerbisect import fault_forms as forms
from layerbisect.captures.errors import LayerBisectError

if TYPE_CHECKING:
    import torch

Form = Callable[[Any, int], AbstractContextManager[None]]
"""From a causal language model and a layer's number to the context in which the fault is there."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and the truth about it.

    ``point`` is the suffix of the first point that comes out wrong although what its operator was
    given is right; ``operator`` is that operator. ``per_layer`` says whether a layer is to blame,
    and not what comes after the last one. ``dense`` is the operator where the layer has no experts,
    None where the fault needs them. ``needs_qk_norm`` leaves Llama out.
    """

    name: str
    operator: str
    per_layer: bool
    point: str
    description: str
    form: Form
    dense: str | None
    needs_qk_norm: bool = False

    def point_in(self, layer: int | None) -> str:
        """Name the first wrong point."""
        return f"layers.{layer}.{self.point}" if self.per_layer else self.point


def _fault(
    name: str,
    operator: str,
    point: str,
    description: str,
    form: Form,
    *,
    per_layer: bool = True,
    dense: str | None = "",
    needs_qk_norm: bool = False,
) -> Fault:
    same = operator if dense == "" else dense
    return Fault(name, operator, per_layer, point, description, form, same, needs_qk_norm)


_ALL = (
    _fault(
        "norm-eps",
        "norm",
        "attn.norm",
        f"the attention norm adds {forms.NORM_EPS:g} to the mean square, not the model's eps",
        forms.norm_eps,
    ),
    _fault(
        "norm-weight",
        "norm",
        "mlp.norm",
        "the MLP norm has the weight of a neighbouring layer, as after a wrong name in loading",
        forms.norm_weight,
    ),
    _fault(
        "qk-norm-skipped",
        "norm",
        "attn.q",
        "queries and keys are not normed",
        attention.qk_norm_skipped,
        needs_qk_norm=True,
    ),
    _fault(
        "rope-base",
        "rope",
        "attn.q",
        "queries and keys are rotated with a default base instead of the model's",
        attention.rope_base,
    ),
    _fault(
        "rope-shifted",
        "rope",
        "attn.q",
        "queries are rotated as if one position later, keys rightly",
        attention.rope_shifted,
    ),
    _fault(
        "softmax-scale",
        "attention",
        "attn.context",
        f"attention scores are multiplied by {attention.SOFTMAX_SCALE:g} too much",
        attention.softmax_scale,
    ),
    _fault(
        "mask-off-by-one",
        "attention",
        "attn.context",
        "a token does not attend to itself, as with a KV length that is one too short",
        attention.mask_off_by_one,
    ),
    _fault(
        "kv-heads-regrouped",
        "attention",
        "attn.context",
        "query head h reads KV head h mod n instead of that of its group",
        attention.kv_heads_regrouped,
    ),
    _fault(
        "o-proj-permuted",
        "linear",
        "attn.out",
        "the output projection takes the first two heads for one another",
        attention.o_proj_permuted,
    ),
    _fault(
        "residual-dropped",
        "residual",
        "mid",
        "what attention computes is not added to the residual stream",
        forms.residual_dropped,
    ),
    _fault(
        "router-low-precision",
        "router",
        "mlp.router_logits",
        "the router reads its input in 8 bits (e4m3, one scale a tensor)",
        forms.router_low_precision,
        dense=None,
    ),
    _fault(
        "top-k-not-renormalised",
        "router",
        "mlp.expert_weights",
        "the weights of a token's experts do not add up to one, or do where they should not",
        forms.top_k_not_renormalised,
        dense=None,
    ),
    _fault(
        "experts-swapped",
        "experts",
        "mlp.out",
        "experts 0 and 1 compute for one another, as after a wrong order in loading",
        forms.experts_swapped,
        dense=None,
    ),
    _fault(
        "gate-up-swapped",
        "experts",
        "mlp.out",
        "the gate and up projections of the MLP are taken for one another",
        forms.gate_up_swapped,
        dense="linear",
    ),
    _fault(
        "final-norm-weight",
        "norm",
        "final_norm",
        f"the final norm computes with a stale weight, off by {forms.STALE_NOISE:.0%} a channel",
        forms.final_norm_weight,
        per_layer=False,
    ),
    _fault(
        "head-scaled",
        "head",
        "logits",
        f"logits are multiplied by {forms.HEAD_SCALE:g}, before they are rounded",
        forms.head_scaled,
        per_layer=False,
    ),
)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}


@dataclass(frozen=True, slots=True)
class Truth:
    """What a verdict on a planted fault must say; ``layer`` is None for what is no layer's."""

    fault: str
    layer: int | None
    operator: str
    point: str


@contextmanager
def plant(model: torch.nn.Module, name: str, layer: int | None = None) -> Iterator[Truth]:
    """Let a transformers model compute wrongly while the context is open.

    Args:
        model: a causal language model that :func:`layerbisect.capture` supports.
        name: one of `FAULTS`.
        layer: which layer is to be wrong; ignored by a fault that is no layer's.

    The forward of a wrong rotation swaps a function of the model's source file for as long as one
    layer runs, so do not run another model of that class at the same time in another thread.

    Raises:
        LayerBisectError: no such fault, no such layer, or a model in which it cannot be.
    """
    from layerbisect.captures.transformers_adapter import Anatomy

    if name not in FAULTS:
        raise LayerBisectError(f"unknown fault {name!r}; choose one of {', '.join(FAULTS)}")
    fault, anatomy = FAULTS[name], Anatomy.of(model)
    at = 0
    if fault.per_layer:
        if layer is None or not 0 <= layer < anatomy.num_layers:
            raise LayerBisectError(
                f"{name} needs a layer from 0 to {anatomy.num_layers - 1}, got {layer}"
            )
        at = layer
    operator = fault.operator if at in anatomy.moe_layers or not fault.per_layer else fault.dense
    if operator is None:
        raise LayerBisectError(
            f"{name} needs a layer with experts; layer {at} of this "
            f"{type(anatomy.model).__name__} has none"
        )
    if fault.needs_qk_norm and not hasattr(anatomy.model.model.layers[at].self_attn, "q_norm"):
        raise LayerBisectError(
            f"{name} needs a model with q/k norms; {type(anatomy.model).__name__} has none"
        )
    with fault.form(anatomy.model, at):
        where = layer if fault.per_layer else None
        yield Truth(name, where, operator, fault.point_in(where))
