"""Where SGLang 0.5.23 shows each point of Qwen3-MoE, Qwen3 and Llama, and what a rank holds of it.

=================  ==========================================================  ====================
point              where                                                       under tensor parallel
=================  ==========================================================  ====================
embed              ``embed_tokens``, out                                       whole
layers.i.input     ``self_attn``, in: the batch's residual stream              whole
attn.norm          ``self_attn``, in                                           whole
attn.q, .k, .v     ``self_attn.attn``, in                                      heads of this rank
attn.context       ``self_attn.attn``, out                                     heads of this rank
attn.out           ``self_attn.o_proj``, out                                   partial sum
mid                ``mlp``, in: the batch's residual stream                    whole
mlp.norm           ``mlp``, in                                                 whole
mlp.router_logits  ``mlp.gate``, out                                           whole
mlp.expert_*       ``mlp.topk``, out                                           whole
mlp.out            ``mlp``, out                                                partial sum
layers.L-1.output  ``norm``, out: the residual sum that it returns             whole
final_norm         ``norm``, out                                               whole
logits             not observable: computed for the rows to be sampled or scored, never kept
=================  ==========================================================  ====================

The residual stream is read where the layer has just written it, and not from what the norm modules
return: a norm fused with the all-reduce before it bypasses its module, and the stream is the same.
SGLang's norms work on the unrounded sum of stream and branch, which no tensor holds: a norm's input
is known to one rounding of the dtype.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerbisect.captures.format import CaptureInfo, How, TensorHeader
from layerbisect.captures.points import Point
from layerbisect.captures.recorder import Pick, Tap

if TYPE_CHECKING:
    import torch

LAYER = r"model\.layers\.(?P<layer>\d+)"


@dataclass(frozen=True, slots=True)
class Layout:
    """This process's place among those that serve the model; sizes are counts of processes.

    ``attention_rank`` of ``attention_size`` processes share a row's heads; ``rank`` and ``world``
    number every process that writes the capture.
    """

    rank: int
    world: int
    tensor_rank: int
    tensor_size: int
    attention_rank: int
    attention_size: int
    pipeline_size: int
    data_size: int
    expert_size: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def sizes(self) -> dict[str, int]:
        """Parallel sizes as a capture names them."""
        return {
            "tp": self.tensor_size,
            "pp": self.pipeline_size,
            "dp": self.data_size,
            "ep": self.expert_size,
        }

    @property
    def mlp_gathers(self) -> bool:
        """Say whether the MLP works on the rows of several data-parallel groups at once."""
        return self.attention_size != self.tensor_size

    def partial(self, suffix: str) -> bool:
        """Say whether each rank holds only a part of the sum."""
        return suffix in ("attn.out", "mlp.out") and self.attention_size > 1

    def header(self, point: Point) -> TensorHeader:
        """Describe which part of ``point`` this process holds."""
        rank, size = self.attention_rank, self.attention_size
        if self.partial(point.suffix):
            return TensorHeader(point.dims, partial_sum=(rank, size), how="partial_sum")
        for dim, total in (("head", self.heads), ("kv_head", self.kv_heads)):
            if dim in point.dims and size > 1:
                # with more processes than KV heads, neighbours hold copies of one head
                held = max(1, total // size)
                start = rank * total // size // held * held
                return TensorHeader(point.dims, shards={dim: (start, start + held, total)})
        return TensorHeader(point.dims)


def taps(
    layout: Layout, num_layers: int, check: Callable[[torch.Tensor], torch.Tensor | None]
) -> tuple[Tap, ...]:
    """Return the table above as taps, of modules named from the root of the model.

    ``check`` sees every tensor before it is recorded; it returns None, or raises, to keep it out.
    """

    def tap(
        module: str, suffix: str, pick: Pick, when: Literal["before", "after"] = "after"
    ) -> Tap:
        def checked(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            value = pick(args, kwargs, output)
            return None if value is None else check(value)

        how: How = "partial_sum" if layout.partial(suffix) else "observed"
        if module.startswith(LAYER):
            suffix = f"layers.{{layer}}.{suffix}"
        return Tap(module, suffix, checked, when=when, how=how)

    whole = (
        tap(r"model\.embed_tokens", "embed", _out),
        tap(LAYER + r"\.self_attn", "input", _stream, "before"),
        tap(LAYER + r"\.self_attn", "attn.norm", _hidden_in, "before"),
        tap(LAYER + r"\.self_attn\.attn", "attn.q", _argument(0), "before"),
        tap(LAYER + r"\.self_attn\.attn", "attn.k", _argument(1), "before"),
        tap(LAYER + r"\.self_attn\.attn", "attn.v", _argument(2), "before"),
        tap(LAYER + r"\.self_attn\.attn", "attn.context", _out),
        tap(LAYER + r"\.self_attn\.o_proj", "attn.out", _out),
        tap(LAYER + r"\.mlp", "mid", _stream, "before"),
        tap(LAYER + r"\.mlp", "mlp.norm", _hidden_in, "before"),
        tap(LAYER + r"\.mlp\.gate", "mlp.router_logits", _out),
        tap(LAYER + r"\.mlp\.topk", "mlp.expert_ids", _field("topk_ids")),
        tap(LAYER + r"\.mlp\.topk", "mlp.expert_weights", _field("topk_weights")),
        tap(LAYER + r"\.mlp", "mlp.out", _out),
        tap(r"model\.norm", f"layers.{num_layers - 1}.output", _residual_sum),
        tap(r"model\.norm", "final_norm", _out),
    )
    # rows of other data-parallel groups, in no order that this process knows
    hidden = (".mlp.", "mlp.out") if layout.mlp_gathers else ()
    return tuple(t for t in whole if not any(part in t.point for part in hidden))


def _tensor(value: Any) -> Any:
    """Pass a tensor on; a quantized pair, a handle of the engine's or None is not the point."""
    return value if hasattr(value, "untyped_storage") else None


def _out(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    # linear layers return (output, bias), norms (normed, residual sum)
    return _tensor(output[0] if isinstance(output, tuple) else output)


def _argument(place: int) -> Pick:
    def pick(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return _tensor(args[place] if place < len(args) else kwargs.get("qkv"[place]))

    return pick


def _hidden_in(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    # attention is called with keywords alone, the MLP with its input first
    return _tensor(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    for value in (*kwargs.values(), *args):
        if hasattr(value, "residual_stream"):
            return _tensor(getattr(value.residual_stream, "residual", None))
    return None


def _field(name: str) -> Pick:
    def pick(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # routing done inside the expert kernel leaves no such field
        return _tensor(getattr(output, name, None))

    return pick


def _residual_sum(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    return _tensor(output[1] if isinstance(output, tuple) else None)


def layout_of(runner: Any) -> Layout:
    """Read this process's place from SGLang's runtime context."""
    from sglang.srt.runtime_context import get_parallel

    parallel, config = get_parallel(), runner.model_config
    data = max(1, parallel.dp_size // parallel.attn_dp_size)
    within = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    each = parallel.pp_size * parallel.tp_size
    return Layout(
        rank=(parallel.dp_rank or 0) * each + within if data > 1 else within,
        world=data * each,
        tensor_rank=parallel.tp_rank,
        tensor_size=parallel.tp_size,
        attention_rank=parallel.attn_tp_rank,
        attention_size=parallel.attn_tp_size,
        pipeline_size=parallel.pp_size,
        data_size=data * parallel.attn_dp_size,
        expert_size=parallel.moe_ep_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )


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
        parallel=layout.sizes,
        environment=_settings(runner.server_args) | {"torch": torch.__version__},
    )


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


_SETTINGS = (
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
    return {name: str(getattr(args, name)) for name in _SETTINGS if hasattr(args, name)}
