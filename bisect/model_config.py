"""The shape of a supported model, read from the config.json of its checkpoint directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerbisect.captures.errors import ModelDirectoryError
from layerbisect.kernels.rope import ROPE_TYPES

MODEL_TYPES = ("llama", "qwen3", "qwen3_moe")

_POSITIVE = (
    "num_layers",
    "hidden",
    "intermediate",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "decoder_sparse_step",
)

# what each scaled rope type cannot do without
_SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder-only model.

    ``experts`` is 0 for a dense model; ``rope_scaling`` is None for the default rotary embedding
    and otherwise holds ``rope_type`` and its parameters; ``sliding_windows`` has a window or None
    for each layer.
    """

    model_type: str
    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    tied: bool
    qk_norm: bool
    attention_bias: bool
    sliding_windows: tuple[int | None, ...]
    experts: int = 0
    top_k: int = 0
    renormalise: bool = False
    expert_intermediate: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that route to experts; empty for a dense model."""
        return tuple(layer for layer in range(self.num_layers) if self.is_sparse(layer))

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer routes to experts."""
        return (
            self.experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Read ``config.json``; raises ModelDirectoryError when it is missing or unsupported."""
        path = Path(directory) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise ModelDirectoryError(
                f"no config.json in {directory}; give the directory of a Hugging Face checkpoint"
            ) from None
        except (OSError, ValueError) as error:
            raise ModelDirectoryError(f"cannot read {path} ({error}); save it again") from None
        if not isinstance(raw, dict):
            raise ModelDirectoryError(f"{path} must hold a JSON object, got {type(raw).__name__}")
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Interpret a parsed config.json, of transformers 4 or 5.

        Raises ModelDirectoryError for a model type or a feature that the reference doesn't compute
        and for a missing key; ``source`` names the file in the message.
        """
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ModelDirectoryError(
                f"{source} has model_type {model_type!r}, but the reference model knows only "
                f"{', '.join(MODEL_TYPES)}"
            )
        _refuse_unsupported(raw, source)
        moe = model_type == "qwen3_moe"
        try:
            hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
            layers = int(raw["num_hidden_layers"])
            theta, scaling = _rope(raw, source)
            config = cls(
                model_type=model_type,
                num_layers=layers,
                hidden=hidden,
                intermediate=int(raw["intermediate_size"]),
                heads=heads,
                kv_heads=int(raw.get("num_key_value_heads") or heads),
                # Qwen3's configuration class has this default, the others derive it
                head_dim=int(
                    raw.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads)
                ),
                vocab=int(raw["vocab_size"]),
                eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope_theta=theta,
                rope_scaling=scaling,
                tied=bool(raw.get("tie_word_embeddings", False)),
                qk_norm=model_type != "llama",
                attention_bias=bool(raw.get("attention_bias", False)),
                sliding_windows=_sliding_windows(raw, model_type, layers),
                experts=_experts(raw) if moe else 0,
                top_k=int(raw["num_experts_per_tok"]) if moe else 0,
                renormalise=moe and bool(raw.get("norm_topk_prob", False)),
                expert_intermediate=int(raw["moe_intermediate_size"]) if moe else 0,
                decoder_sparse_step=int(raw.get("decoder_sparse_step", 1)) if moe else 1,
                mlp_only_layers=tuple(raw.get("mlp_only_layers") or ()) if moe else (),
            )
        except KeyError as error:
            raise ModelDirectoryError(f"{source} lacks {error.args[0]!r}; save it again") from None
        except ModelDirectoryError:
            raise
        except (TypeError, ValueError) as error:
            raise ModelDirectoryError(
                f"{source} holds a value of the wrong kind ({error}); save it again"
            ) from None
        _check_sizes(config, source)
        return config


def _experts(raw: Mapping[str, Any]) -> int:
    # transformers renamed it in version 5 and writes either
    return int(raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"])


def _check_sizes(config: ModelConfig, source: str) -> None:
    for key in _POSITIVE:
        if getattr(config, key) < 1:
            raise ModelDirectoryError(
                f"{source} gives {key} = {getattr(config, key)}, which must be positive"
            )
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise ModelDirectoryError(
            f"{source} has {config.heads} heads of {config.head_dim} channels and "
            f"{config.kv_heads} key heads; heads must share key heads evenly, channels be even"
        )
    if config.model_type == "qwen3_moe" and not 1 <= config.top_k <= config.experts:
        raise ModelDirectoryError(
            f"{source} routes to {config.top_k} of {config.experts} experts, which is impossible"
        )


def _refuse_unsupported(raw: Mapping[str, Any], source: str) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelDirectoryError(
            f"{source} has hidden_act {raw['hidden_act']!r}, but the reference knows only 'silu'"
        )
    if raw.get("mlp_bias"):
        raise ModelDirectoryError(f"{source} has mlp_bias true, which the reference doesn't know")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise ModelDirectoryError(
            f"{source} has quantised weights ({method!r}); give the unquantised checkpoint"
        )


def _rope(raw: Mapping[str, Any], source: str) -> tuple[float, dict[str, Any] | None]:
    """Return base and scaling, from ``rope_parameters`` (5.x) or ``rope_scaling`` (4.x)."""
    given = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(given.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if kind not in ROPE_TYPES:
        raise ModelDirectoryError(
            f"{source} has rope_type {kind!r}, but the reference knows only {', '.join(ROPE_TYPES)}"
        )
    partial = given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelDirectoryError(
            f"{source} has partial_rotary_factor {partial}, but the reference turns whole heads"
        )
    if kind == "default":
        return theta, None
    missing = [key for key in _SCALING_KEYS[kind] if given.get(key) is None]
    if missing:
        raise ModelDirectoryError(
            f"{source} has rope_type {kind!r} without {missing[0]!r}; save it again"
        )
    if given.get("original_max_position_embeddings") is None:
        given["original_max_position_embeddings"] = raw["max_position_embeddings"]
    return theta, {"rope_type": kind, **given}


def _sliding_windows(
    raw: Mapping[str, Any], model_type: str, layers: int
) -> tuple[int | None, ...]:
    """Return each layer's window; in Qwen3 ``layer_types`` or ``max_window_layers`` picks some."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    if window is None or model_type == "llama":
        return (None,) * layers
    if model_type == "qwen3_moe":
        return (int(window),) * layers
    types = raw.get("layer_types")
    if types is None:
        full = int(raw.get("max_window_layers", 28))
        return tuple(None if layer < full else int(window) for layer in range(layers))
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)
