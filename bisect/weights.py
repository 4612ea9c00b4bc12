"""A model's weights by checkpoint name: their expected shapes, dtype conversion, and experts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch

from layerbisect.bisect.checkpoint import Checkpoint, TensorCache
from layerbisect.bisect.model_config import ModelConfig

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def expected_shapes(config: ModelConfig, fused_experts: bool) -> dict[str, tuple[int, ...]]:
    """Name every tensor that the reference reads, with its shape.

    ``fused_experts`` says that each layer stores its experts as two 3-D tensors instead of three
    matrices an expert.
    """
    shapes: dict[str, tuple[int, ...]] = {
        EMBED: (config.vocab, config.hidden),
        FINAL_NORM: (config.hidden,),
    }
    if not config.tied:
        shapes[HEAD] = (config.vocab, config.hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        own = _attention_shapes(config) | _mlp_shapes(config, layer, fused_experts)
        shapes |= {prefix + name: shape for name, shape in own.items()}
    return shapes


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (config.hidden,),
        "self_attn.q_proj.weight": (queries, config.hidden),
        "self_attn.k_proj.weight": (keys, config.hidden),
        "self_attn.v_proj.weight": (keys, config.hidden),
        "self_attn.o_proj.weight": (config.hidden, queries),
        "post_attention_layernorm.weight": (config.hidden,),
    }
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    if config.attention_bias:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"self_attn.{name}.bias"] = shapes[f"self_attn.{name}.weight"][:1]
    return shapes


def _mlp_shapes(config: ModelConfig, layer: int, fused: bool) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden, config.expert_intermediate
    if not config.is_sparse(layer):
        return _gated_shapes("mlp", hidden, config.intermediate)
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (config.experts, hidden)}
    if fused:
        shapes["mlp.experts.gate_up_proj"] = (config.experts, 2 * inner, hidden)
        shapes["mlp.experts.down_proj"] = (config.experts, hidden, inner)
        return shapes
    for expert in range(config.experts):
        shapes |= _gated_shapes(f"mlp.experts.{expert}", hidden, inner)
    return shapes


def _gated_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


class Weights:
    """The weights as an operator wants them: in the compute dtype, rounded as an engine holds them.

    ``weight_dtype`` is the dtype that the judged engine holds its weights in; None keeps what the
    checkpoint stores. Converted tensors are cached up to ``cache_bytes``; tensors that need no
    conversion stay mapped.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        compute_dtype: torch.dtype,
        weight_dtype: torch.dtype | None,
        cache_bytes: int,
    ) -> None:
        self.checkpoint = checkpoint
        self._config = config
        self._compute_dtype = compute_dtype
        self._weight_dtype = weight_dtype
        self._cache = TensorCache(cache_bytes)
        self._fused = any(
            f"model.layers.{layer}.mlp.experts.gate_up_proj" in checkpoint
            for layer in config.moe_layers
        )
        expected = expected_shapes(config, self._fused)
        checkpoint.check(expected)
        self.names = tuple(sorted(expected))

    def get(self, name: str, round_to: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor in the compute dtype, rounded through ``round_to``."""
        return self._converted(name, name, round_to, lambda: self.checkpoint.tensor(name))

    def rows(self, name: str, index: torch.Tensor) -> torch.Tensor:
        """Return some rows of a matrix in the compute dtype, without converting the others."""
        picked = self.checkpoint.tensor(name)[index]
        return self._round(picked, None).to(self._compute_dtype)

    def head(self, round_to: torch.dtype | None = None) -> torch.Tensor:
        """Return the output embedding [vocab, hidden] in a float dtype; mapped where it can be."""
        name = EMBED if self._config.tied else HEAD
        held = self._weight_dtype or self.checkpoint.dtype(name)
        if (round_to or held) == self.checkpoint.dtype(name):
            return self.checkpoint.tensor(name)
        # the log-prob operator converts tile by tile, so this stays in the narrow dtype
        return self._cache.get(
            ("head", round_to), lambda: self._round(self.checkpoint.tensor(name), round_to)
        )

    def experts(self, layer: int, round_to: torch.dtype | None) -> tuple[Experts, Experts]:
        """Return a layer's ``gate_up`` and ``down`` matrices, read when indexed by expert."""
        prefix, tensor = f"model.layers.{layer}.mlp.experts.", self.checkpoint.tensor

        def fused(part: str, expert: int) -> torch.Tensor:
            name = f"{prefix}{part}_proj"
            return self._converted((name, expert), name, round_to, lambda: tensor(name)[expert])

        def single(part: str, expert: int) -> torch.Tensor:
            parts = ("gate", "up") if part == "gate_up" else ("down",)
            names = [f"{prefix}{expert}.{each}_proj.weight" for each in parts]
            return self._converted(
                (part, names[0]),
                names[0],
                round_to,
                lambda: torch.cat([tensor(name) for name in names]),
            )

        read = fused if self._fused else single
        count = self._config.experts
        return Experts(count, partial(read, "gate_up")), Experts(count, partial(read, "down"))

    def _converted(
        self,
        key: Hashable,
        name: str,
        round_to: torch.dtype | None,
        read: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Cache what ``read`` returns, converted; ``name`` is the tensor that it comes from."""
        if round_to == (self._weight_dtype or self.checkpoint.dtype(name)):
            # what is already held in that dtype shares its entry with the unrounded tensor
            round_to = None
        return self._cache.get(
            (key, round_to), lambda: self._round(read(), round_to).to(self._compute_dtype)
        )

    def _round(self, stored: torch.Tensor, round_to: torch.dtype | None) -> torch.Tensor:
        held = stored if self._weight_dtype is None else stored.to(self._weight_dtype)
        return held if round_to is None else held.to(round_to)


class Experts:
    """One matrix an expert, read when asked for; satisfies ``kernels.experts.ExpertWeights``."""

    def __init__(self, count: int, read: Callable[[int], torch.Tensor]) -> None:
        self._count = count
        self._read = read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, expert: int, /) -> torch.Tensor:
        return self._read(expert)
