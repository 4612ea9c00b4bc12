"""Steps that tests let a Megatron job do, by `module:function`; see scripts/megatron_engine.py."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from scripts.megatron_engine import Rank
from scripts.megatron_model import forward, transformer_config


def fused_norms(rank: Rank, step: dict[str, Any]) -> list[Any]:
    """Capture a model whose norms are fused into the linear layers, as TransformerEngine's are.

    TransformerEngine cannot be installed without CUDA: a column-parallel layer that norms its input
    and has the norm's weight under TransformerEngine's name stands in for its own.
    """
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    import layerbisect
    from layerbisect.captures.megatron.weights import load_checkpoint

    class NormedLinear(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_size, *args, **kwargs)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            normed = torch.nn.functional.rms_norm(
                x, x.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon
            )
            return super().forward(normed, *args, **kwargs)

    hf = json.loads((rank.model / "config.json").read_text())
    config = transformer_config(hf, rank.layout, bf16=False)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=True, normalization="RMSNorm"
    )
    parts = spec.submodules
    parts.input_layernorm = IdentityOp
    parts.self_attention.submodules.linear_qkv = NormedLinear
    if config.num_moe_experts is None:
        parts.pre_mlp_layernorm = IdentityOp
        # 0.19 has it bound to a partial
        mlp = getattr(parts.mlp, "keywords", None) or vars(parts.mlp)
        mlp["submodules"].linear_fc1 = NormedLinear
    model = GPTModel(
        config,
        spec,
        vocab_size=math.ceil(hf["vocab_size"] / 128) * 128,
        max_sequence_length=512,
        position_embedding_type="rope",
        rotary_base=hf["rope_parameters"]["rope_theta"],
        share_embeddings_and_output_weights=False,
    ).eval()
    load_checkpoint(model, rank.model)
    with layerbisect.capture(model, step["capture"], points="all", vocab=hf["vocab_size"]):
        forward([model], [[ids] for ids in step["tokens"]])
    return []


def train_with_recomputation(rank: Rank, step: dict[str, Any]) -> dict[str, Any]:
    """Run a forward with gradients in which every layer is computed again in the backward.

    Megatron keeps the state of CUDA's generator for that; the CPU's stands in.
    """
    import torch
    from megatron.core.tensor_parallel import random

    import layerbisect

    def state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    chunk = rank.chunks[0]
    config = chunk.config
    ids = torch.tensor(step["tokens"])
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
    layer = next(m for path, m in chunk.named_modules() if path.endswith("decoder.layers.0"))
    calls = []
    counting = layer.register_forward_hook(lambda *_: calls.append(1))
    patch = pytest.MonkeyPatch()
    patch.setattr(random, "_get_cuda_rng_state", state)
    patch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
    patch.setattr(config, "recompute_granularity", "full")
    patch.setattr(config, "recompute_method", "uniform")
    patch.setattr(config, "recompute_num_layers", 1)
    try:
        chunk.train()
        with layerbisect.capture(chunk, step["capture"], points="all", vocab=step["vocab"]):
            out = chunk(ids, torch.arange(ids.shape[1]).expand_as(ids), mask)
            torch.autograd.backward(out.square().mean())
    finally:
        patch.undo()
        counting.remove()
        chunk.eval()
        chunk.zero_grad(set_to_none=True)
    return {"calls of the first layer": len(calls)}


def load_weights(rank: Rank, step: dict[str, Any]) -> None:
    """Load the weights of another checkpoint, the directory ``model``, and keep them."""
    from layerbisect.captures.megatron.weights import load_checkpoint

    load_checkpoint(rank.chunks, step["model"])
