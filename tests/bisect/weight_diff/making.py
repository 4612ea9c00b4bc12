"""Small checkpoints whose tensors are at hand, to break one side of a pair."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from layerbisect.bisect.weight_diff.compare import compare
from layerbisect.bisect.weight_diff.report import WeightReport

Tensors = dict[str, torch.Tensor]

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, INNER, VOCAB = 3, 64, 4, 2, 16, 4, 32, 128
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "tie_word_embeddings": False,
}


def make_weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Tensors:
    """Draw the weights of a tiny Qwen3-MoE."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).mul(shape[-1] ** -0.5).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return torch.exp(0.25 * torch.randn(size, generator=draw)).to(dtype)

    made: Tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN)}
    made["model.norm.weight"] = norm(HIDDEN)
    if not tied:
        made["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{stem}{name}.weight"] = norm(HIDDEN)
        for name in ("q_norm", "k_norm"):
            made[f"{stem}self_attn.{name}.weight"] = norm(HEAD_DIM)
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            made[f"{stem}self_attn.{name}_proj.weight"] = matrix(rows * HEAD_DIM, HIDDEN)
        made[f"{stem}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        made[f"{stem}mlp.gate.weight"] = matrix(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name in ("gate", "up"):
                made[f"{stem}mlp.experts.{expert}.{name}_proj.weight"] = matrix(INNER, HIDDEN)
            made[f"{stem}mlp.experts.{expert}.down_proj.weight"] = matrix(HIDDEN, INNER)
    return made


def write_checkpoint(
    directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] = CONFIG
) -> Path:
    """Write a checkpoint directory of one file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {k: v.contiguous().clone() for k, v in tensors.items()}, directory / "model.safetensors"
    )
    return directory


def compared(
    folder: Path,
    first: Tensors,
    second: Tensors,
    previous: Tensors | None = None,
    configs: tuple[Mapping[str, Any], Mapping[str, Any]] = (CONFIG, CONFIG),
) -> WeightReport:
    """Write both sides as checkpoints and compare them."""
    sides = [
        write_checkpoint(folder / name, tensors, config)
        for name, tensors, config in zip(
            ("rollout", "trainer"), (first, second), configs, strict=True
        )
    ]
    before = None if previous is None else write_checkpoint(folder / "previous", previous)
    return compare(*sides, previous=before)


def updated(tensors: Tensors, seed: int = 1, size: float = 1e-3) -> Tensors:
    """Take one optimizer step: every value moves by about ``size`` of its tensor's deviation."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: (x.float() + size * float(x.float().std()) * torch.randn(x.shape, generator=draw)).to(
            x.dtype
        )
        for name, x in tensors.items()
    }


def each(tensors: Tensors, ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change all tensors whose names end so."""
    for name in [n for n in tensors if n.endswith(ending)]:
        tensors[name] = change(tensors[name])


def low_rank_delta(x: torch.Tensor, rank: int, size: float, seed: int = 5) -> torch.Tensor:
    """A product of two thin matrices, with ``size`` times the norm of ``x``."""
    draw = torch.Generator().manual_seed(seed)
    delta = torch.randn(x.shape[0], rank, generator=draw) @ torch.randn(
        rank, x.shape[1], generator=draw
    )
    norms = [float(torch.linalg.vector_norm(y.float())) for y in (x, delta)]
    return delta.mul(size * norms[0] / norms[1])


Block = tuple[int, int]


def quantise(
    x: torch.Tensor, block: Block = (16, 16), floor: float = 1e-10, powers: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale by block and round to E4M3; return values and scales of their product."""
    rows, columns = x.shape
    split = x.float().reshape(rows // block[0], block[0], columns // block[1], block[1])
    scale = (split.abs().amax((1, 3)) / 448).clamp_min(floor)
    if powers:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (split / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    return values, scale


def quantised(tensors: Tensors, **options: Any) -> Tensors:
    """Quantise every projection."""
    made: Tensors = {}
    for name, x in tensors.items():
        if name.endswith("_proj.weight"):
            made[name], made[name + "_scale_inv"] = quantise(x, **options)
        else:
            made[name] = x
    return made


QUANTISED: dict[str, Any] = {
    **CONFIG,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]},
}
