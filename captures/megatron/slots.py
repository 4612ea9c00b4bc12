"""Walk a Megatron model's parameters, and find what checkpoints call them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.megatron.cuts import TABLE, Cut, NotLogical, Rule, Slot
from layerbisect.captures.megatron.model import unwrap
from layerbisect.captures.megatron.place import Place
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
_ALL_EXPERTS = re.compile(r"mlp\.experts\.weight(?P<which>[12])")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def slots(model: Model, *, vocab: int | None = None) -> tuple[list[Slot], dict[str, str]]:
    """Return this process's slots, and why parameters that it holds have none.

    No process is asked and nothing is copied. Names of layers and experts are those of the whole
    model. A parameter that no checkpoint's name is known for goes by its own name.

    Args:
        model: the job's GPTModel, wrapped or not, or its list of chunks.
        vocab: rows of the vocabulary; without it the rows that pad it count as well.

    Raises:
        LayerBisectError: there is no GPTModel in it, or no such vocabulary.
    """
    if vocab is not None and vocab < 1:
        raise LayerBisectError(
            f"vocab={vocab} is no number of rows; give how many the checkpoint's embedding has"
        )
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
    """Yield what the chunk holds by one spelling, layers and experts by their global numbers."""
    named = dict(chunk.model.named_parameters())
    # the bias that balances a router is no parameter
    named |= {n: b for n, b in chunk.model.named_buffers() if n.endswith(".router.expert_bias")}
    numbers = {path: number for number, path in chunk.layers.items()}
    for own, tensor in named.items():
        name = plain_name(own)
        for pattern, one in _SPELLINGS:
            name = pattern.sub(one, name)
        found = _IN_LAYER.fullmatch(name)
        if found is None:
            yield name, tensor
            continue
        layer = f"decoder.layers.{numbers[found['layer']]}"
        for rest, view in _by_expert(chunk.config, place, found["rest"], tensor):
            yield f"{layer}.{rest}", view


def _by_expert(
    config: Any, place: Place, name: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Number a layer's experts over all processes, and take them apart where they are stacked."""
    local = (config.num_moe_experts or 0) // place.expert[1]
    first = place.expert[0] * local
    if found := _EXPERT.fullmatch(name):
        number = first + int(found["expert"])
        yield f"mlp.experts.local_experts.{number}.{found['rest']}", tensor
    elif found := _ALL_EXPERTS.fullmatch(name):
        # [expert, in, out] in memory, whatever the parameter's shape says
        inner = (config.hidden_size, -1) if found["which"] == "1" else (-1, config.hidden_size)
        for expert, matrix in enumerate(tensor.view(local, *inner), first):
            kind = f"linear_fc{found['which']}.weight"
            yield f"mlp.experts.local_experts.{expert}.{kind}", matrix.T
    elif config.moe_shared_expert_gate:
        yield name.replace("mlp.shared_experts.", "mlp.shared_expert."), tensor
    else:
        yield name, tensor


def _look_up(chunk: Chunk, place: Place, name: str, vocab: int | None) -> tuple[Rule | None, Cut]:
    """Find the table's rule for a parameter, and the checkpoint's names; None for an unknown."""
    module, _, last = name.rpartition(".")
    rule, names = TABLE.get(_NUMBER.sub("*", f"{module}.").removesuffix("."), (None, ()))
    if module == "output_layer" and chunk.model.share_embeddings_and_output_weights:
        # the copy that a later stage has
        names = TABLE["embedding.word_embeddings"][1]
    numbers = _NUMBER.findall(module)
    full = tuple(f"{n.format(*numbers)}.{last}" for n in names) or (name,)
    group = place.expert_tensor if ".local_experts." in name else place.tensor
    return rule, Cut(full, group, chunk.config, vocab)
