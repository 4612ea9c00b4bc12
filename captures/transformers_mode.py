"""What a transformers model does in a training forward alone, and at which points it shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from layerbisect.captures.forward_mode import Dropout, ForwardMode, dropout_modules
from layerbisect.captures.points import boundary
from layerbisect.captures.transformers_adapter import Anatomy

if TYPE_CHECKING:
    import torch

# the first that matches says which point a module under a layer changes first
_PLACES = (
    (r"self_attn\.([qkv])_(proj|norm)(\..*)?", r"attn.\1"),
    (r"self_attn\.o_proj(\..*)?", "attn.out"),
    (r"self_attn(\..*)?", "attn.context"),
    (r"input_layernorm(\..*)?", "attn.norm"),
    (r"post_attention_layernorm(\..*)?", "mlp.norm"),
    (r"mlp\.gate(\..*)?", "mlp.router_logits"),
    (r"mlp(\..*)?", "mlp.out"),
)
_ENDS = {"model.embed_tokens": "embed", "model.norm": "final_norm", "lm_head": "logits"}
_LAYER = re.compile(r"model\.layers\.(\d+)(?:\.(.+))?")


def mode_of(anatomy: Anatomy) -> ForwardMode:
    """Describe the mode in which the model is being called."""
    import torch

    model = anatomy.model
    drops = dict(dropout_modules(model))
    for _, attention in anatomy.attention_layers():
        # applied by the attention function, not by a module of its own
        p = float(getattr(attention, "attention_dropout", 0.0) or 0.0)
        if p > 0 and attention.training:
            drops[_path_of(model, attention)] = p
    again = model.training and bool(getattr(model, "is_gradient_checkpointing", False))
    return ForwardMode(
        training=bool(model.training),
        gradients=torch.is_grad_enabled(),
        recompute="gradient_checkpointing" if again else "",
        dropout=tuple(
            Dropout(path, p, shown_at(path, anatomy.num_layers, anatomy.moe_layers))
            for path, p in drops.items()
        ),
    )


def shown_at(path: str, layers: int, moe_layers: tuple[int, ...]) -> str:
    """Name the first point that a module changes; empty for one whose place is not known."""
    for start, point in _ENDS.items():
        if path == start or path.startswith(f"{start}."):
            return point
    found = _LAYER.fullmatch(path)
    if found is None:
        return ""
    layer, rest = int(found[1]), found[2] or ""
    for pattern, place in _PLACES:
        if match := re.fullmatch(pattern, rest):
            suffix = match.expand(place)
            if suffix == "mlp.router_logits" and layer not in moe_layers:
                suffix = "mlp.out"
            return f"layers.{layer}.{suffix}"
    return boundary(layer + 1, layers)


def _path_of(model: torch.nn.Module, wanted: torch.nn.Module) -> str:
    paths = (path for path, module in model.named_modules() if module is wanted)
    return str(next(paths))
