"""Where Megatron-core shows each point of a GPTModel, and what a rank holds of it.

==================  =====================================================  =====================
point               where, under ``decoder.layers.{n}`` unless at an end   on one rank
==================  =====================================================  =====================
embed               ``embedding``, out                                     scattered rows
layers.i.input      the layer, in                                          scattered rows
attn.norm           ``input_layernorm``, out                               scattered rows
attn.q, .k, .v      ``self_attention.core_attention``, in                  heads
attn.context        ``self_attention.linear_proj``, in                     heads
attn.out            ``self_attention.linear_proj``, out: reduced           scattered rows
mid                 ``pre_mlp_layernorm``, in                              scattered rows
mlp.norm            ``pre_mlp_layernorm``, out                             scattered rows
mlp.router_logits   ``mlp.router``: what its ``gating`` returns            scattered rows
mlp.expert_ids      ``mlp.router``, out: derived, by expert number         scattered rows
mlp.expert_weights  ``mlp.router``, out: derived, by expert number         scattered rows
mlp.expert_in, out  see captures/megatron/experts.py                       scattered rows
mlp.out             ``mlp``, out: combined and reduced                     scattered rows
layers.L-1.output   the last layer, out                                    scattered rows
final_norm          ``decoder.final_layernorm``, out                       scattered rows
logits              ``output_layer``, out                                  vocabulary
==================  =====================================================  =====================

Rows are scattered over the tensor-parallel ranks by sequence parallelism alone. TransformerEngine's
layer specs put an identity where a norm is fused into the linear layer after it: what goes in is
the stream, and the norm's own output is then not observable. The router returns a map of experts,
so the order of slots is not there: they come in the order of expert numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from layerbisect.captures.format import How, PointSeen, TensorHeader
from layerbisect.captures.megatron.model import Chunk
from layerbisect.captures.megatron.place import Place
from layerbisect.captures.points import LAYER_DIMS, MODEL_DIMS, Point
from layerbisect.captures.recorder import Pick, Tap

if TYPE_CHECKING:
    import torch

_GATHERED = ("attn.q", "attn.k", "attn.v", "attn.context", "logits", "logprob")
SCATTERED = frozenset({*LAYER_DIMS, *MODEL_DIMS} - {*_GATHERED})
"""Points of which a rank holds its share of the rows under sequence parallelism."""

_FUSED = "the norm is fused into the linear layer after it"


def taps(chunk: Chunk) -> Iterator[Tap]:
    """Yield the table above as taps, of modules named from the root of a chunk."""
    yield Tap("embedding", "embed", _out)
    for layer, path in chunk.layers.items():
        yield from _layer_taps(chunk, layer, path)
    yield Tap(r"decoder\.final_layernorm", "final_norm", _out)


def unseen(chunk: Chunk) -> dict[str, PointSeen]:
    """Say of this chunk's points which a fused module hides."""
    hidden = {}
    for layer, path in chunk.layers.items():
        module = chunk.model.get_submodule(path)
        for name, suffix in (("input_layernorm", "attn.norm"), ("pre_mlp_layernorm", "mlp.norm")):
            if _is_identity(getattr(module, name)):
                hidden[f"layers.{layer}.{suffix}"] = PointSeen("not_observable", _FUSED)
    return hidden


def header(point: Point, config: Any, place: Place) -> TensorHeader:
    """Describe which part of ``point`` a rank holds, the vocabulary and the rows left out."""
    rank, size = place.tensor
    totals = {
        "head": int(config.num_attention_heads),
        "kv_head": int(config.num_query_groups or config.num_attention_heads),
    }
    for dim, total in totals.items():
        if dim in point.dims and size > 1:
            # with more ranks than KV heads, neighbours hold copies of one head
            held = max(1, total // size)
            start = rank * total // size // held * held
            return TensorHeader(point.dims, shards={dim: (start, start + held, total)})
    derived = point.suffix in ("mlp.expert_ids", "mlp.expert_weights")
    return TensorHeader(point.dims, how="derived" if derived else "observed")


def _layer_taps(chunk: Chunk, layer: int, path: str) -> Iterator[Tap]:
    module = chunk.model.get_submodule(path)

    def tap(
        name: str,
        suffix: str,
        pick: Pick,
        when: Literal["before", "after"] = "after",
        how: How = "observed",
    ) -> Tap:
        place = path + (f".{name}" if name else "")
        return Tap(re.escape(place), f"layers.{layer}.{suffix}", pick, when, how)

    yield tap("", "input", _argument(0, "hidden_states"), "before")
    if not _is_identity(module.input_layernorm):
        yield tap("input_layernorm", "attn.norm", _out)
    for place, part in enumerate(("query", "key", "value")):
        pick = _argument(place, part)
        yield tap("self_attention.core_attention", f"attn.{part[0]}", pick, "before")
    yield tap("self_attention.linear_proj", "attn.context", _argument(0, "input_"), "before")
    if not getattr(chunk.config, "attention_output_gate", False):
        # selective recomputation runs no projection
        core = re.escape(f"{path}.self_attention.core_attention")
        yield Tap(core, f"layers.{layer}.attn.context", _out, again=True)
    yield tap("self_attention.linear_proj", "attn.out", _out)
    yield tap("pre_mlp_layernorm", "mid", _argument(0, "hidden_states"), "before")
    if not _is_identity(module.pre_mlp_layernorm):
        yield tap("pre_mlp_layernorm", "mlp.norm", _out)
    if hasattr(module.mlp, "router"):
        slots = int(chunk.config.moe_router_topk)
        for suffix, what in (("mlp.expert_ids", 0), ("mlp.expert_weights", 1)):
            yield tap("mlp.router", suffix, partial(_routes, slots, what), how="derived")
    yield tap("mlp", "mlp.out", _out)
    if layer == chunk.config.num_layers - 1:
        yield tap("", "output", _out)


def _is_identity(module: Any) -> bool:
    return type(module).__name__ in ("IdentityOp", "IdentityFuncOp")


def _out(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    # linear layers return (output, bias), layers (stream, context)
    return output[0] if isinstance(output, tuple) else output


def _argument(place: int, name: str) -> Pick:
    def pick(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return args[place] if place < len(args) else kwargs.get(name)

    return pick


def _routes(
    slots: int, what: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> torch.Tensor | None:
    """Turn (probabilities, map), both [token, expert], into IDs or weights [token, slot].

    A slot that a token does not use (it was dropped, or padding) has the ID -1 and the weight 0.
    """
    import torch

    probs, routed = output[0], output[1]
    if routed.dtype != torch.bool or routed.shape != probs.shape:
        return None
    experts = routed.shape[-1]
    numbers = torch.arange(experts, device=routed.device).expand_as(routed)
    ids = torch.where(routed, numbers, experts).sort(-1).values[:, :slots]
    used = ids < experts
    if what == 0:
        return torch.where(used, ids, -1)
    return torch.where(used, probs.detach().gather(-1, ids.clamp(max=experts - 1)), 0)
