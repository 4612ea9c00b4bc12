"""What Megatron's GPTModel does in a training forward alone, and at which points it shows."""

from __future__ import annotations

import re
from typing import Any

from layerbisect.captures.forward_mode import Dropout, ForwardMode, dropout_modules
from layerbisect.captures.megatron.model import Chunk
from layerbisect.captures.points import boundary

_NOISE = (
    "moe_input_jitter_eps",
    "moe_router_force_load_balancing",
    "moe_router_enable_expert_bias",
    "moe_expert_capacity_factor",
)
# below a layer's path; the first that matches says which point a module changes first
_PLACES = (
    (r"self_attention\.(linear_qkv|[qk]_layernorm)(\..*)?", "attn.q"),
    (r"self_attention\.linear_proj(\..*)?", "attn.out"),
    (r"self_attention(\..*)?", "attn.context"),
    (r"input_layernorm(\..*)?", "attn.norm"),
    (r"pre_mlp_layernorm(\..*)?", "mlp.norm"),
    (r"mlp\.router(\..*)?", "mlp.router_logits"),
    (r"mlp(\..*)?", "mlp.out"),
)
_ENDS = {"embedding": "embed", "decoder.final_layernorm": "final_norm", "output_layer": "logits"}


def mode_of(chunk: Chunk) -> ForwardMode:
    """Describe the mode in which a chunk is being called."""
    import torch

    config, model = chunk.config, chunk.model
    drops = [Dropout(path, p, _shown_at(chunk, path)) for path, p in dropout_modules(model)]
    found = {drop.module for drop in drops}
    for layer, path in chunk.layers.items():
        module = model.get_submodule(path)
        if not module.training:
            continue
        # no modules: Megatron drops as it adds to the stream, TransformerEngine in its kernels
        if p := float(getattr(module, "hidden_dropout", 0.0) or 0.0):
            drops.append(Dropout(f"{path}.self_attn_bda", p, f"layers.{layer}.mid"))
            after = boundary(layer + 1, config.num_layers)
            drops.append(Dropout(f"{path}.mlp_bda", p, after))
        core = f"{path}.self_attention.core_attention"
        p = float(config.attention_dropout or 0.0)
        if p and _transformer_engine(module) and not any(n.startswith(core) for n in found):
            drops.append(Dropout(core, p, f"layers.{layer}.attn.context"))
    granularity = getattr(config, "recompute_granularity", None)
    noise = {name: getattr(config, name, None) for name in _NOISE}
    return ForwardMode(
        training=bool(model.training),
        gradients=torch.is_grad_enabled(),
        recompute=f"recompute_granularity {granularity}" if granularity and model.training else "",
        dropout=tuple(drops),
        noise={name: str(value) for name, value in noise.items() if value},
    )


def _transformer_engine(layer: Any) -> bool:
    return type(layer.self_attention.core_attention).__name__.startswith("TE")


def _shown_at(chunk: Chunk, path: str) -> str:
    """Name the first point that a module changes; empty for one whose place is not known."""
    for start, point in _ENDS.items():
        if path == start or path.startswith(f"{start}."):
            return point
    for layer, above in chunk.layers.items():
        if not path.startswith(f"{above}."):
            continue
        rest = path.removeprefix(f"{above}.")
        for pattern, suffix in _PLACES:
            if re.fullmatch(pattern, rest):
                if suffix == "mlp.router_logits" and layer not in chunk.moe_layers:
                    suffix = "mlp.out"
                return f"layers.{layer}.{suffix}"
        return boundary(layer + 1, chunk.config.num_layers)
    return ""
