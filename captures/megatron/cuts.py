"""Which parts of which checkpoint tensors a Megatron parameter holds: one table, both ways.

A slot is a view of a parameter, which is read to save a weight and written to load one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.megatron.place import Coordinate
from layerbisect.captures.weights.format import Extent, Part

if TYPE_CHECKING:
    import torch


# where kernels of TransformerEngine want gate's and up's rows in turn
_GLU_ORDERS = {
    ".mlp.experts.": "moe_mlp_glu_interleave_size",
    ".mlp.shared_expert": "moe_shared_expert_glu_interleave_size",
}


class NotLogical(Exception):
    """A parameter that is no part of a checkpoint's tensor; the message says why."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The part ``extents`` of the checkpoint's tensor ``name``, in a parameter.

    ``view`` is a view of the parameter, of any strides, whose values in row order are those of the
    part, of ``shape``.
    """

    name: str
    view: torch.Tensor
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]

    @property
    def whole(self) -> bool:
        """Say whether the part is all of the tensor."""
        return all((start, stop) == (0, total) for start, stop, total in self.extents)

    def values(self) -> torch.Tensor:
        """Return the part; where it is no view, a copy on the CPU."""
        if tuple(self.view.shape) == self.shape:
            return self.view
        # a trainer's device has no memory to spare
        return self.view.to("cpu").reshape(self.shape)

    def part(self) -> Part:
        """Return the part as a weight snapshot takes it."""
        return Part(self.name, self.values(), self.extents)

    def fill(self, values: torch.Tensor) -> None:
        """Write the part of ``shape`` into the parameter."""
        self.view.copy_(values.reshape(self.view.shape))


@dataclass(frozen=True, slots=True)
class Cut:
    """What decides how a parameter is cut; ``group`` is the rank and size among its shards."""

    names: tuple[str, ...]
    group: Coordinate
    config: Any
    vocab: int | None


Rule = Callable[["torch.Tensor", Cut], Iterator[Slot]]


def _slot(name: str, view: torch.Tensor, shards: Mapping[int, Extent]) -> Slot:
    part = Part.of(name, view, shards)
    return Slot(name, view, tuple(view.shape), part.extents)


def _share(held: int, place: Coordinate) -> Extent:
    rank, size = place
    return (rank * held, (rank + 1) * held, size * held)


def _whole(tensor: torch.Tensor, cut: Cut) -> Iterator[Slot]:
    yield _slot(cut.names[0], tensor, {})


def _norm(tensor: torch.Tensor, cut: Cut) -> Iterator[Slot]:
    if cut.config.layernorm_zero_centered_gamma:
        raise NotLogical("held as its difference from 1")
    yield _slot(cut.names[0], tensor, {})


def _columns(tensor: torch.Tensor, cut: Cut) -> Iterator[Slot]:
    # its bias is whole, and added after the sum over the group
    shards = {1: _share(int(tensor.shape[1]), cut.group)} if tensor.ndim == 2 else {}
    yield _slot(cut.names[0], tensor, shards)


def _halves(tensor: torch.Tensor, cut: Cut) -> Iterator[Slot]:
    """Split [gate's rows of this rank; up's rows of this rank]."""
    if not cut.config.gated_linear_unit:
        raise NotLogical("of an MLP without a gate, which checkpoints name in many ways")
    for where, setting in _GLU_ORDERS.items():
        if where in cut.names[0] and getattr(cut.config, setting, None):
            raise NotLogical(f"its gate and up rows are interleaved ({setting})")
    for name, half in zip(cut.names, tensor.chunk(2), strict=True):
        yield _slot(name, half, {0: _share(len(half), cut.group)})


def _vocabulary(tensor: torch.Tensor, cut: Cut) -> Iterator[Slot]:
    start, stop, padded = _share(len(tensor), cut.group)
    total = padded if cut.vocab is None else cut.vocab
    if not 1 <= total <= padded:
        raise LayerBisectError(
            f"the {padded} rows of {cut.names[0]} hold no vocabulary of {total}; give as vocab how "
            "many rows the checkpoint has that the model was configured for"
        )
    start, stop = min(start, total), min(stop, total)
    yield _slot(cut.names[0], tensor[: stop - start], {0: (start, stop, total)})


def _interleaved(tensor: torch.Tensor, cut: Cut) -> Iterator[Slot]:
    """Split rows that go by query group: its query heads, its key head, its value head.

    All groups' rows are spread evenly, so that with more ranks than groups a rank holds a stretch
    of one (``megatron.core.transformer.attention``, ``get_query_key_value_tensors``).
    """
    config = cut.config
    if getattr(config, "attention_output_gate", False):
        raise NotLogical("the queries' gates are packed among them")
    groups, head = int(config.num_query_groups), int(config.kv_channels)
    widths = (config.num_attention_heads // groups * head, head, head)
    group = sum(widths)
    start, stop, total = _share(len(tensor), cut.group)
    if total != groups * group:
        raise NotLogical(f"its {total} rows are not {groups} groups of {group}")
    first, low = divmod(start, group)
    high = low + len(tensor)
    whole = low == 0 and high % group == 0
    if not whole and high > group:
        raise NotLogical("its rows straddle query groups")
    before = 0
    for name, width in zip(cut.names, widths, strict=True):
        if whole:
            view = tensor.unflatten(0, (-1, group))[:, before : before + width]
            rows = (first * width, (first + high // group) * width)
        else:
            a, b = (min(max(at, before), before + width) for at in (low, high))
            view = tensor[a - low : b - low] if a < b else tensor[:0]
            rows = (first * width + a - before, first * width + b - before)
        before += width
        extents = ((*rows, groups * width), *((0, n, n) for n in tensor.shape[1:]))
        yield Slot(name, view, tuple(stop - start for start, stop, _ in extents), extents)


_OF_LAYER: Mapping[str, tuple[Rule, tuple[str, ...]]] = {
    "input_layernorm": (_norm, ("input_layernorm",)),
    "self_attention.linear_qkv": (
        _interleaved,
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ),
    "self_attention.q_layernorm": (_norm, ("self_attn.q_norm",)),
    "self_attention.k_layernorm": (_norm, ("self_attn.k_norm",)),
    "self_attention.linear_proj": (_columns, ("self_attn.o_proj",)),
    "pre_mlp_layernorm": (_norm, ("post_attention_layernorm",)),
    "mlp.linear_fc1": (_halves, ("mlp.gate_proj", "mlp.up_proj")),
    "mlp.linear_fc2": (_columns, ("mlp.down_proj",)),
    "mlp.router": (_whole, ("mlp.gate",)),
    "mlp.experts.local_experts.*.linear_fc1": (
        _halves,
        ("mlp.experts.{1}.gate_proj", "mlp.experts.{1}.up_proj"),
    ),
    "mlp.experts.local_experts.*.linear_fc2": (_columns, ("mlp.experts.{1}.down_proj",)),
    "mlp.shared_experts.linear_fc1": (
        _halves,
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    ),
    "mlp.shared_experts.linear_fc2": (_columns, ("mlp.shared_experts.down_proj",)),
    # families whose shared expert has a gate write it in the singular
    "mlp.shared_expert.linear_fc1": (
        _halves,
        ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    ),
    "mlp.shared_expert.linear_fc2": (_columns, ("mlp.shared_expert.down_proj",)),
    "mlp.shared_expert.gate": (_whole, ("mlp.shared_expert_gate",)),
}
TABLE: Mapping[str, tuple[Rule, tuple[str, ...]]] = {
    "embedding.word_embeddings": (_vocabulary, ("model.embed_tokens",)),
    "decoder.final_layernorm": (_norm, ("model.norm",)),
    "output_layer": (_vocabulary, ("lm_head",)),
    **{
        f"decoder.layers.*.{module}": (rule, tuple(f"model.layers.{{0}}.{name}" for name in names))
        for module, (rule, names) in _OF_LAYER.items()
    },
}
"""Rule and checkpoint names by Megatron's module: ``*`` and ``{0}`` are the layer, the next the
expert."""
