"""What an SGLang capture is of: the model, its weights, the settings that change its numbers."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerbisect.captures.fingerprint import fingerprint
from layerbisect.captures.format import CaptureInfo
from layerbisect.captures.numerics_environment import numerics_environment
from layerbisect.captures.sglang.layout import Layout

if TYPE_CHECKING:
    import torch


def info_of(runner: Any, layout: Layout, label: str, points: tuple[str, ...]) -> CaptureInfo:
    """Describe the capture: the model, the engine and the settings that change its numbers."""
    import torch
    from sglang.version import __version__

    return CaptureInfo(
        engine="sglang",
        engine_version=__version__,
        label=label,
        device=torch.cuda.get_device_name() if runner.device == "cuda" else str(runner.device),
        dtype=str(runner.dtype).removeprefix("torch."),
        num_layers=runner.model_config.num_hidden_layers,
        moe_layers=moe_layers(runner),
        points=points,
        model_config=_config(runner),
        weight_version=weight_version(runner),
        fingerprints={
            name: fingerprint(tensor) for name, tensor in checkpoint_tensors(runner, layout)
        },
        parallel=layout.sizes,
        environment={
            **_settings(runner.server_args),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **numerics_environment(os.environ),
        },
    )


def checkpoint_tensors(runner: Any, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that this process holds whole and as the checkpoint has them, by its names.

    Those are the norms and the router on any rank, and without tensor parallelism all that no
    kernel wants packed in its own way.
    """
    whole = layout.tensor_size == 1
    for name, tensor in runner.model.named_parameters():
        stem, _, last = name.rpartition(".")
        module = stem.rpartition(".")[2]
        if last != "weight" and module != "experts" or not tensor.is_floating_point():
            continue
        if module.endswith("norm") or stem.endswith("mlp.gate"):
            yield name, tensor
        elif not whole or tensor.dtype != runner.dtype:
            # a shard, or quantized
            continue
        elif module in ("o_proj", "down_proj"):
            yield name, tensor
        elif module in ("embed_tokens", "lm_head"):
            # padded to what divides well
            yield name, tensor[: runner.model_config.vocab_size]
        elif module in ("qkv_proj", "gate_up_proj"):
            parts = _QKV if module == "qkv_proj" else ("gate_proj", "up_proj")
            heads = (layout.heads, layout.kv_heads, layout.kv_heads)
            sizes = [n * layout.head_dim for n in heads] if module == "qkv_proj" else 2
            split = tensor.split(sizes) if isinstance(sizes, list) else tensor.chunk(sizes)
            for part, view in zip(parts, split, strict=True):
                yield f"{stem.removesuffix(module)}{part}.weight", view
        elif runner.device == "cpu" and last in ("w13_weight", "w2_weight"):
            # GPU kernels want the experts in orders of their own
            for expert, weight in enumerate(tensor):
                names = ("gate_proj", "up_proj") if last == "w13_weight" else ("down_proj",)
                for part, view in zip(names, weight.chunk(len(names)), strict=True):
                    yield f"{stem}.{expert}.{part}.weight", view


def moe_layers(runner: Any) -> tuple[int, ...]:
    """Say which layers route to experts, as SGLang built them."""
    sparse = [hasattr(getattr(layer, "mlp", None), "gate") for layer in runner.model.model.layers]
    # layers of other pipeline stages are empty here; SGLang builds them like its own
    return tuple(range(len(sparse))) if any(sparse) else ()


def weight_version(runner: Any) -> str | None:
    """The name that the trainer gave to the weights that are loaded."""
    from sglang.srt.runtime_context import get_serving

    version = getattr(get_serving(), "weight_version", None)
    return None if version is None else str(version)


def experts_renumbered(runner: Any) -> bool:
    """Say whether the expert numbers that the router returns are places and not experts."""
    args = runner.server_args
    return bool(
        args.enable_eplb
        or args.ep_num_redundant_experts
        or args.init_expert_location not in (None, "trivial")
    )


def _config(runner: Any) -> Mapping[str, Any]:
    path = Path(runner.model_config.model_path, "config.json")
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    plain: dict[str, Any] = json.loads(runner.model_config.hf_config.to_json_string(use_diff=False))
    return plain


_QKV = ("q_proj", "k_proj", "v_proj")
SETTINGS = (
    "attention_backend",
    "sampling_backend",
    "moe_runner_backend",
    "quantization",
    "kv_cache_dtype",
    "chunked_prefill_size",
    "disable_radix_cache",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "enable_deterministic_inference",
    "rl_on_policy_target",
    "enable_fp32_lm_head",
    "enable_torch_compile",
    "speculative_algorithm",
)


def _settings(args: Any) -> dict[str, str]:
    found = {name: getattr(args, name, None) for name in SETTINGS}
    return {name: str(value) for name, value in found.items() if value is not None}
