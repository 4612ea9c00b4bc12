"""Faults of embedding, norms and residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from layerbisect.fault_forms import NORM_EPS, norm_eps, residual_dropped
from layerbisect.fault_tools import attribute_replaced, forward_replaced
from scripts.planted.fault import Control, Form, ModelFault
from scripts.planted.weight_tools import drawn, weights_replaced

EPS_SHARE = 0.03
"""A wrong eps is more than the right one by so much of the embedding's mean square, so that the
first norm is off by about 1.5 %; an eps is nothing by itself, and the reports give no size."""
LOST_ROWS = 8


def _norms(model: Any) -> Iterator[Any]:
    """All RMSNorms of a model."""
    for block in model.model.layers:
        for owner, names in (
            (block, ("input_layernorm", "post_attention_layernorm")),
            (block.self_attn, ("q_norm", "k_norm")),
        ):
            yield from (getattr(owner, name) for name in names if hasattr(owner, name))
    yield model.model.norm


def _wrong_eps(model: Any) -> float:
    embedding = model.model.embed_tokens.weight.detach().float()
    return float(model.config.rms_norm_eps + EPS_SHARE * embedding.square().mean())


@contextmanager
def every_norm_eps(model: Any, layer: int) -> Iterator[None]:
    eps = _wrong_eps(model)
    with ExitStack() as stack:
        for norm in _norms(model):
            stack.enter_context(attribute_replaced(norm, "variance_epsilon", eps))
        yield


@contextmanager
def mlp_norms_eps(model: Any, layer: int) -> Iterator[None]:
    eps = _wrong_eps(model)
    with ExitStack() as stack:
        for block in model.model.layers:
            norm = block.post_attention_layernorm
            stack.enter_context(attribute_replaced(norm, "variance_epsilon", eps))
        yield


def _every_norm(forward: Callable[[Any, torch.Tensor], Any]) -> Form:
    """Make a form in which all norms compute ``forward(norm, hidden)``."""

    @contextmanager
    def form(model: Any, layer: int) -> Iterator[None]:
        def wrapped(norm: Any, own: Any, hidden: torch.Tensor) -> Any:
            return forward(norm, hidden)

        with ExitStack() as stack:
            for norm in _norms(model):
                stack.enter_context(forward_replaced(norm, partial(wrapped, norm)))
            yield

    return form


def _normed(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The norm without its weight, in float32."""
    wide = hidden.float()
    mean_square = wide.square().mean(-1, keepdim=True)
    normed: torch.Tensor = wide * torch.rsqrt(mean_square + norm.variance_epsilon)
    return normed


def _one_added(norm: Any, hidden: torch.Tensor) -> Any:
    return (_normed(norm, hidden) * (1 + norm.weight.float())).to(hidden.dtype)


def _in_bfloat16(norm: Any, hidden: torch.Tensor) -> Any:
    return (norm.weight.bfloat16() * _normed(norm, hidden).bfloat16()).to(hidden.dtype)


def _cast_last(norm: Any, hidden: torch.Tensor) -> Any:
    return (norm.weight.float() * _normed(norm, hidden)).to(hidden.dtype)


def _attended(block: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """What attention adds to the stream."""
    added: torch.Tensor = block.self_attn(hidden_states=block.input_layernorm(hidden), **kwargs)[0]
    return added


def residual_rounded(model: Any, layer: int) -> AbstractContextManager[None]:
    block = model.model.layers[layer]

    def forward(own: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        mid = hidden_states + _attended(block, hidden_states, kwargs)
        mid = mid.bfloat16().to(mid.dtype)
        return mid + block.mlp(block.post_attention_layernorm(mid))

    return forward_replaced(block, forward)


@contextmanager
def norms_of_unrounded_sums(model: Any, layer: int) -> Iterator[None]:
    def forward(block: Any, own: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        exact = hidden_states.float() + _attended(block, hidden_states, kwargs).float()
        mid = exact.to(hidden_states.dtype)

        def fused(own_norm: Any, rounded: torch.Tensor) -> Any:
            norm = block.post_attention_layernorm
            return norm.weight * _normed(norm, exact).to(rounded.dtype)

        with forward_replaced(block.post_attention_layernorm, fused):
            return mid + block.mlp(block.post_attention_layernorm(mid))

    with ExitStack() as stack:
        for block in model.model.layers:
            stack.enter_context(forward_replaced(block, partial(forward, block)))
        yield


def _embedding_scaled(factor: float) -> Form:
    def form(model: Any, layer: int) -> AbstractContextManager[None]:
        def forward(own: Any, ids: torch.Tensor) -> torch.Tensor:
            embedded: torch.Tensor = own(ids)
            return (embedded.float() * factor).to(embedded.dtype)

        return forward_replaced(model.model.embed_tokens, forward)

    return form


def embedding_rows_lost(model: Any, layer: int) -> AbstractContextManager[None]:
    weight = model.model.embed_tokens.weight.detach().clone()
    new = drawn(weight[-LOST_ROWS:], "rows lost") * model.config.initializer_range
    weight[-LOST_ROWS:] = new.to(weight.dtype)
    return weights_replaced([((model.model.embed_tokens, "weight"), weight)])


FAULTS: tuple[ModelFault, ...] = (
    ModelFault(
        name="norm-eps",
        component="input_norm",
        operator="norm",
        point="attn.norm",
        form=norm_eps,
        reports=("meta-llama/llama#771",),
        description=f"a layer's attention norm adds {NORM_EPS:g} to the mean square",
        changes=0.9,
    ),
    ModelFault(
        name="every-norm-eps",
        component="input_norm",
        operator="norm",
        point="attn.norm",
        form=every_norm_eps,
        reports=("meta-llama/llama#771",),
        description="all norms have the eps of a wrong configuration",
        layers="all",
        changes=0.9,
    ),
    ModelFault(
        name="norms-in-bfloat16",
        component="input_norm",
        operator="norm",
        point="attn.norm",
        form=_every_norm(_in_bfloat16),
        reports=("sgl-project/sglang#27540", "vllm-project/vllm#42379"),
        description="all norms round to bfloat16 before and after they multiply by their weight",
        layers="all",
        dtypes=("float32",),
        changes=0.9,
    ),
    ModelFault(
        name="norm-weights-plus-one",
        component="input_norm",
        operator="norm",
        point="attn.norm",
        form=_every_norm(_one_added),
        reports=("utensils/mold#1078",),
        description="all norms multiply by 1 + w although their weights hold the 1 already",
        layers="all",
        changes=0.9,
    ),
    ModelFault(
        name="mlp-norms-eps",
        component="post_norm",
        operator="norm",
        point="mlp.norm",
        form=mlp_norms_eps,
        reports=("NVIDIA-NeMo/Megatron-Bridge#5712",),
        description="the norms after attention have a default eps, and all others the model's",
        layers="all",
        changes=0.9,
    ),
    ModelFault(
        name="attention-not-added",
        component="residual",
        operator="residual",
        point="mid",
        form=residual_dropped,
        reports=("radixark/Megatron-LM#31",),
        description="what a layer's attention computes is not carried on in the residual stream",
        changes=0.9,
    ),
    ModelFault(
        name="residual-in-bfloat16",
        component="residual",
        operator="residual",
        point="mid",
        form=residual_rounded,
        reports=("radixark/Megatron-LM#31",),
        description="the residual stream is rounded to bfloat16 once more, in one layer",
        dtypes=("float32",),
        changes=0.9,
    ),
    ModelFault(
        name="embedding-scale-unrounded",
        component="embedding",
        operator="embedding",
        point="embed",
        form=_embedding_scaled(3072**0.5 / 55.5),
        reports=("huggingface/transformers#29402",),
        description="embeddings are multiplied by 55.4256 where the model wants 55.5, its rounding",
        layers="none",
        # half a unit of bfloat16's last place is more, and a model with no scale rounds it away
        dtypes=("float32",),
        changes=0.9,
    ),
    ModelFault(
        name="embedding-scale-of-float32",
        component="embedding",
        operator="embedding",
        point="embed",
        form=_embedding_scaled(1152**0.5 / 34),
        reports=("huggingface/transformers#38702",),
        description="in float32 embeddings are multiplied by 33.9411, and in bfloat16 by 34",
        layers="none",
        dtypes=("float32",),
        changes=0.9,
    ),
    ModelFault(
        name="embedding-rows-lost",
        component="embedding",
        operator="embedding",
        point="embed",
        form=embedding_rows_lost,
        reports=("unslothai/unsloth-zoo#923",),
        description=f"the last {LOST_ROWS} rows of the embedding are as they were initialised",
        layers="none",
        changes=0.005,
    ),
)

CONTROLS: tuple[Control, ...] = (
    Control(
        name="norm-casts-last",
        description="all norms multiply by their weight in float32, and round once, after it",
        reports=(
            "NVIDIA/TransformerEngine#1132",
            "vllm-project/vllm#42379",
            "sgl-project/sglang#27540",
        ),
        form=_every_norm(_cast_last),
        dtypes=("bfloat16",),
    ),
    Control(
        name="norms-of-unrounded-sums",
        description="norms after attention read the residual sum before it is rounded, as where "
        "adding and norming are one kernel",
        reports=("radixark/Megatron-LM#31",),
        form=norms_of_unrounded_sums,
        dtypes=("bfloat16",),
    ),
)
