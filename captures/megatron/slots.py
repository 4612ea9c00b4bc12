"""Which part of which checkpoint tensor each parameter of a Megatron model is, as views.

One table serves both directions: a slot's view is read to save a weight, and written to load one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerbisect.captures.megatron.model import unwrap
from layerbisect.captures.megatron.place import Coordinate, Place
from layerbisect.captures.weights.format import Extent, Part
from layerbisect.captures.weights.names import plain_name

if TYPE_CHECKING:
    import torch

    from layerbisect.captures.megatron.model import Chunk, Model

# what layer specs call one parameter in several ways, brought to one
_SPELLINGS = tuple(
    (re.compile(pattern), one)
    for pattern, one in (
        # TransformerEngine's linear layers hold the norm before them
        (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)", r"input_layernorm.\1"),
        (r"mlp\.linear_fc1\.layer_norm_(weight|bias)", r"pre_mlp_layernorm.\1"),
        # and its grouped ones a parameter for each expert
        (
            r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)",
            r"mlp.experts.local_experts.\3.\1.\2",
        ),
        (r"mlp\.shared_experts\.gate_weight", "mlp.shared_experts.gate.weight"),
        (r"mlp\.router\.expert_bias", "mlp.router.e_score_correction_bias"),
    )
)
_IN_LAYER = re.compile(r"(?P<layer>decoder\.layers\.\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.+)")
# grouped experts without TransformerEngine: all of a process in one parameter
_ALL_EXPERTS = re.compile(r"(?P<home>.+\.mlp\.experts)\.weight(?P<which>[12])")


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
class _Cut:
    """What decides how a parameter is cut; ``group`` is the rank and size among its shards."""

    names: tuple[str, ...]
    group: Coordinate
    config: Any
    vocab: int | None


_Rule = Callable[["torch.Tensor", _Cut], Iterator[Slot]]


def _slot(name: str, view: torch.Tensor, shards: Mapping[int, Extent]) -> Slot:
    part = Part.of(name, view, shards)
    return Slot(name, view, tuple(view.shape), part.extents)


def _share(held: int, place: Coordinate) -> Extent:
    rank, size = place
    return (rank * held, (rank + 1) * held, size * held)


def _whole(tensor: torch.Tensor, cut: _Cut) -> Iterator[Slot]:
    yield _slot(cut.names[0], tensor, {})


def _norm(tensor: torch.Tensor, cut: _Cut) -> Iterator[Slot]:
    if cut.config.layernorm_zero_centered_gamma:
        raise NotLogical("held as its difference from 1")
    yield _slot(cut.names[0], tensor, {})


def _columns(tensor: torch.Tensor, cut: _Cut) -> Iterator[Slot]:
    # its bias is whole, and added after the sum over the group
    shards = {1: _share(int(tensor.shape[1]), cut.group)} if tensor.ndim == 2 else {}
    yield _slot(cut.names[0], tensor, shards)


def _halves(tensor: torch.Tensor, cut: _Cut) -> Iterator[Slot]:
    """Split [gate's rows of this rank; up's rows of this rank]."""
    if not cut.config.gated_linear_unit:
        raise NotLogical("of an MLP without a gate, which checkpoints name in many ways")
    if getattr(cut.config, "moe_mlp_glu_interleave_size", None) and ".experts." in cut.names[0]:
        raise NotLogical("its gate and up rows are interleaved for a kernel")
    for name, half in zip(cut.names, tensor.chunk(2), strict=True):
        yield _slot(name, half, {0: _share(len(half), cut.group)})


def _vocabulary(tensor: torch.Tensor, cut: _Cut) -> Iterator[Slot]:
    start, stop, padded = _share(len(tensor), cut.group)
    total = padded if cut.vocab is None else cut.vocab
    if total > padded:
        raise NotLogical(f"its {padded} rows hold no vocabulary of {total}")
    start, stop = min(start, total), min(stop, total)
    yield _slot(cut.names[0], tensor[: stop - start], {0: (start, stop, total)})


def _interleaved(tensor: torch.Tensor, cut: _Cut) -> Iterator[Slot]:
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


_TABLE: Mapping[str, tuple[_Rule, tuple[str, ...]]] = {
    "embedding.word_embeddings": (_vocabulary, ("model.embed_tokens",)),
    "decoder.final_layernorm": (_norm, ("model.norm",)),
    "output_layer": (_vocabulary, ("lm_head",)),
    # in a layer
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
    "mlp.shared_experts.linear_fc1": (
        _halves,
        ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    ),
    "mlp.shared_experts.linear_fc2": (_columns, ("mlp.shared_expert.down_proj",)),
    "mlp.shared_experts.gate": (_whole, ("mlp.shared_expert_gate",)),
    # of one expert
    "linear_fc1": (_halves, ("gate_proj", "up_proj")),
    "linear_fc2": (_columns, ("down_proj",)),
}


def slots(model: Model, *, vocab: int | None = None) -> tuple[list[Slot], dict[str, str]]:
    """Return this process's slots, and why parameters that it holds have none.

    No process is asked and nothing is copied. Names of layers and experts are those of the whole
    model. A parameter that no checkpoint's name is known for goes by its own name.

    Args:
        model: the job's GPTModel, wrapped or not, or its list of chunks.
        vocab: rows of the vocabulary; without it the rows that pad it count as well.

    Raises:
        LayerBisectError: there is no GPTModel in it.
    """
    found: list[Slot] = []
    left_out: dict[str, str] = {}
    for chunk in unwrap(model):
        place = Place.here(chunk.config)
        for name, tensor in _tensors(chunk, place):
            rule, cut = _look_up(chunk, place, name, vocab)
            try:
                if rule is None:
                    raise NotLogical("no checkpoint's name is known for it")
                if type(tensor.data).__name__ != "Tensor":
                    raise NotLogical(f"held as {type(tensor.data).__name__}")
                found += (slot for slot in rule(tensor.detach(), cut) if slot.view.numel())
            except NotLogical as why:
                left_out |= dict.fromkeys(cut.names, str(why))
    return found, left_out


def _tensors(chunk: Chunk, place: Place) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the chunk holds by one spelling, layers by their numbers in the whole model."""
    named = dict(chunk.model.named_parameters())
    # the routers' bias is no parameter
    named |= {n: b for n, b in chunk.model.named_buffers() if n.endswith(".expert_bias")}
    numbers = {path: number for number, path in chunk.layers.items()}
    for own, tensor in named.items():
        name = plain_name(own)
        for pattern, one in _SPELLINGS:
            name = pattern.sub(one, name)
        found = _IN_LAYER.fullmatch(name)
        if found:
            name = f"decoder.layers.{numbers[found['layer']]}.{found['rest']}"
        stack = _ALL_EXPERTS.fullmatch(name)
        if stack is None:
            yield name, tensor
            continue
        count = chunk.config.num_moe_experts // place.expert[1]
        hidden = chunk.config.hidden_size
        # [expert, in, out] in memory, whatever shape the parameter says
        sizes = (count, hidden, -1) if stack["which"] == "1" else (count, -1, hidden)
        for expert, matrix in enumerate(tensor.view(sizes)):
            yield (
                f"{stack['home']}.local_experts.{expert}.linear_fc{stack['which']}.weight",
                matrix.T,
            )


def _look_up(chunk: Chunk, place: Place, name: str, vocab: int | None) -> tuple[_Rule | None, _Cut]:
    """Find the table's rule for a parameter, and the checkpoint's names; None for an unknown."""
    stem, rest, group = "", name, place.tensor
    if found := _IN_LAYER.fullmatch(name):
        stem, rest = f"model.{found['layer'].removeprefix('decoder.')}.", found["rest"]
    if found := _EXPERT.fullmatch(rest):
        first = place.expert[0] * (chunk.config.num_moe_experts // place.expert[1])
        stem += f"mlp.experts.{first + int(found['expert'])}."
        rest, group = found["rest"], place.expert_tensor
    module, _, last = rest.rpartition(".")
    rule, names = _TABLE.get(module, (None, ()))
    if module == "output_layer" and chunk.model.share_embeddings_and_output_weights:
        # a later stage's copy
        names = _TABLE["embedding.word_embeddings"][1]
    if module.startswith("mlp.shared_experts") and not _gated(chunk):
        names = tuple(n.replace("shared_expert.", "shared_experts.") for n in names)
    full = tuple(f"{stem}{n}.{last}" for n in names) or (name,)
    return rule, _Cut(full, group, chunk.config, vocab)


def _gated(chunk: Chunk) -> bool:
    # families with a gate on their shared experts name them in the singular
    return any(n.endswith("shared_experts.gate_weight") for n, _ in chunk.model.named_parameters())
