"""A Megatron job's model: the GPTModel chunks in it, their layers, and what they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.points import parse, select
from layerbisect.captures.rows import Rows

if TYPE_CHECKING:
    import torch

    Model = torch.nn.Module | Sequence[torch.nn.Module]

_SETTINGS = (
    "transformer_impl",
    "attention_backend",
    "attention_softmax_in_fp32",
    "apply_query_key_layer_scaling",
    "apply_rope_fusion",
    "bias_activation_fusion",
    "masked_softmax_fusion",
    "batch_invariant_mode",
    "deterministic_mode",
    "recompute_granularity",
    "cuda_graph_impl",
    "fp8",
    "fp4",
    "moe_router_dtype",
    "moe_router_pre_softmax",
    "moe_router_fusion",
    "moe_token_dispatcher_type",
    "moe_permute_fusion",
    "moe_grouped_gemm",
    "moe_expert_capacity_factor",
)


@dataclass(frozen=True)
class Chunk:
    """One GPTModel of a process: a pipeline stage, or one of its virtual stages.

    ``layers`` maps a layer's number over the whole model, counted from 0, to its module's path.
    """

    model: Any
    number: int
    count: int
    layers: Mapping[int, str]

    @property
    def config(self) -> Any:
        """Megatron's TransformerConfig."""
        return self.model.config

    def holds(self, point: str) -> bool:
        """Say whether this chunk computes ``point``."""
        layer = parse(point).layer
        if layer is not None:
            return layer in self.layers
        first, last = bool(self.model.pre_process), bool(self.model.post_process)
        return first if point == "embed" else last

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers of the whole model that route to experts."""
        config = self.config
        if not config.num_moe_experts:
            return ()
        every = config.moe_layer_freq
        if isinstance(every, int):
            return tuple(n for n in range(config.num_layers) if n % every == 0)
        return tuple(n for n, sparse in enumerate(every) if sparse)

    def points(self, patterns: str | Sequence[str]) -> tuple[str, ...]:
        """Expand patterns to points of the whole model."""
        return select(patterns, self.config.num_layers, self.moe_layers)

    def settings(self) -> dict[str, str]:
        """Settings that change numbers, as a capture's environment has them."""
        found = {name: getattr(self.config, name, None) for name in _SETTINGS}
        return {name: str(value) for name, value in found.items() if value is not None}


def is_megatron(model: Model) -> bool:
    """Say whether ``model``, or the first of several chunks, holds a Megatron GPTModel."""
    first = model[0] if isinstance(model, Sequence) and model else model
    return hasattr(first, "modules") and any(map(_is_gpt, first.modules()))


def unwrap(model: Model) -> list[Chunk]:
    """Find the GPTModel in each chunk of a job's model, whatever wraps it (DDP, Float16Module).

    Raises LayerBisectError naming what was given where there is none.
    """
    given = list(model) if isinstance(model, Sequence) else [model]
    if not given:
        raise LayerBisectError("the model is an empty list; give the job's list of model chunks")
    found = []
    for number, one in enumerate(given):
        modules = one.modules() if hasattr(one, "modules") else ()
        inner = next((m for m in modules if _is_gpt(m)), None)
        if inner is None:
            raise LayerBisectError(
                f"chunk {number} is a {type(one).__name__} without a Megatron GPTModel; "
                "give the job's own list of model chunks"
            )
        found.append(Chunk(inner, number, len(given), _layers(inner)))
    return found


def check_vocab(chunks: Sequence[Chunk], vocab: int | None) -> None:
    """Raise LayerBisectError for a number of tokens that the model's vocabulary cannot have."""
    padded = int(chunks[0].model.vocab_size)
    whole = isinstance(vocab, int) and not isinstance(vocab, bool)
    if vocab is not None and not (whole and 1 <= vocab <= padded):
        raise LayerBisectError(
            f"vocab is {vocab!r}, and the model's vocabulary has {padded} rows; give the number of "
            f"tokens among them, from 1 to {padded}"
        )


def beyond_vocabulary(rows: Rows, vocab: int | None) -> str | None:
    """Say, in a sentence, which token is none of the ``vocab`` that there are said to be."""
    if vocab is None or not len(rows) or rows.token.max() < vocab:
        return None
    at = int((rows.token >= vocab).argmax())
    return (
        f"token {rows.token[at]} at position {rows.position[at]} lies beyond the vocabulary of "
        f"{vocab} that was given"
    )


def _is_gpt(module: Any) -> bool:
    # by name, so that nothing of Megatron is imported for other engines; subclasses count
    return any(t.__name__ == "GPTModel" for t in type(module).__mro__)


def _layers(model: Any) -> dict[int, str]:
    # layer_number counts from 1 over the whole model, whatever stage or virtual stage holds it
    return {
        int(module.layer_number) - 1: path
        for path, module in model.named_modules()
        if re.fullmatch(r"decoder\.layers\.\d+", path)
    }
