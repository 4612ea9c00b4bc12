"""Which module of a transformers model shows which point.

Covers what transformers 5 calls LlamaForCausalLM, Qwen3ForCausalLM and Qwen3MoeForCausalLM.
Queries, keys and values are not taps: they are seen where the attention function is called.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.fingerprint import fingerprint
from layerbisect.captures.format import CaptureInfo
from layerbisect.captures.numerics_environment import numerics_environment
from layerbisect.captures.points import select
from layerbisect.captures.recorder import Tap

if TYPE_CHECKING:
    import torch

_LAYER = r"model\.layers\.(?P<layer>\d+)"


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _output(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


_DECODER = (
    Tap(r"model\.embed_tokens", "embed", _output),
    Tap(_LAYER, "layers.{layer}.input", _argument, "before"),
    Tap(_LAYER + r"\.input_layernorm", "layers.{layer}.attn.norm", _output),
    Tap(_LAYER + r"\.self_attn\.o_proj", "layers.{layer}.attn.context", _argument, "before"),
    Tap(_LAYER + r"\.self_attn", "layers.{layer}.attn.out", _output),
    Tap(_LAYER + r"\.post_attention_layernorm", "layers.{layer}.mid", _argument, "before"),
    Tap(_LAYER + r"\.post_attention_layernorm", "layers.{layer}.mlp.norm", _output),
    Tap(_LAYER + r"\.mlp", "layers.{layer}.mlp.out", _output),
    Tap(_LAYER, "layers.{layer}.output", _output),
    Tap(r"model\.norm", "final_norm", _output),
)
_ROUTED = (
    Tap(_LAYER + r"\.mlp\.gate", "layers.{layer}.mlp.router_logits", lambda a, k, out: out[0]),
    Tap(_LAYER + r"\.mlp\.gate", "layers.{layer}.mlp.expert_weights", lambda a, k, out: out[1]),
    Tap(_LAYER + r"\.mlp\.gate", "layers.{layer}.mlp.expert_ids", lambda a, k, out: out[2]),
)
TABLE: dict[str, tuple[Tap, ...]] = {
    "LlamaForCausalLM": _DECODER,
    "Qwen3ForCausalLM": _DECODER,
    "Qwen3MoeForCausalLM": (*_DECODER, *_ROUTED),
}
ATTENTION_SUFFIXES = ("attn.q", "attn.k", "attn.v")


@dataclass(frozen=True)
class Anatomy:
    """A supported model: the causal language model itself, and what its captures need to know."""

    model: Any
    taps: tuple[Tap, ...]
    num_layers: int
    moe_layers: tuple[int, ...]
    head_dim: int

    @classmethod
    def of(cls, model: torch.nn.Module) -> Anatomy:
        """Find the model in what may be a wrapper around it (DDP, PEFT).

        Raises LayerBisectError naming the class when there is none that the table knows.
        """
        for module in model.modules():
            # a subclass of a known model has its modules
            known = [t.__name__ for t in type(module).__mro__ if t.__name__ in TABLE]
            if known:
                return cls._build(module, TABLE[known[0]])
        raise LayerBisectError(
            f"cannot capture a {type(model).__name__}; "
            f"supported transformers models are {', '.join(TABLE)}"
        )

    @classmethod
    def _build(cls, model: Any, taps: tuple[Tap, ...]) -> Anatomy:
        config, layers = model.config, model.model.layers
        routed = tuple(i for i, layer in enumerate(layers) if hasattr(layer.mlp, "gate"))
        head_dim = layers[0].self_attn.head_dim
        return cls(model, taps, config.num_hidden_layers, routed, int(head_dim))

    def points(self, patterns: str | Sequence[str]) -> tuple[str, ...]:
        """Expand patterns to this model's points."""
        return select(patterns, self.num_layers, self.moe_layers)

    def attention_layers(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """Layer number and attention module of each layer."""
        for number, layer in enumerate(self.model.model.layers):
            yield number, layer.self_attn

    def info(self, label: str, points: tuple[str, ...]) -> CaptureInfo:
        """Describe a capture of this model."""
        import torch
        import transformers

        config = self.model.config
        device = self.model.device
        environment = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "attn_implementation": str(config._attn_implementation),
        }
        if self.moe_layers:
            environment["experts_implementation"] = str(config._experts_implementation)
        if device.type == "cuda":
            environment["device_name"] = torch.cuda.get_device_name(device)
        return CaptureInfo(
            engine="transformers",
            engine_version=transformers.__version__,
            label=label,
            device=str(device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            num_layers=self.num_layers,
            moe_layers=self.moe_layers,
            points=points,
            # as JSON has it: dtypes and the like become strings
            model_config=json.loads(json.dumps(config.to_dict(), default=str)),
            fingerprints={name: fingerprint(t) for name, t in self.checkpoint_tensors()},
            environment=environment | numerics_environment(os.environ),
        )

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter under the name that its checkpoint has for it, as a view.

        transformers 5 stacks the experts into one parameter; the checkpoint has them apart.
        """
        for name, parameter in self.model.named_parameters():
            stem, _, last = name.rpartition(".")
            if not stem.endswith(".mlp.experts"):
                yield name, parameter
            elif last in ("gate_up_proj", "down_proj") and parameter.ndim == 3:
                for expert, weight in enumerate(parameter.detach()):
                    parts = {"down_proj": weight}
                    if last == "gate_up_proj":
                        gate, up = weight.chunk(2)
                        parts = {"gate_proj": gate, "up_proj": up}
                    for part, view in parts.items():
                        yield f"{stem}.{expert}.{part}.weight", view
