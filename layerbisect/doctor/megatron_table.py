"""The flags of Megatron-core's training scripts, and of miles and slime, that matter to a capture.

Read in the sources of Megatron-core 0.16.1 and 0.19.0, and of the capture itself.
"""

from __future__ import annotations

from layerbisect.doctor.arguments import Flag, Kind
from layerbisect.doctor.rules import Rule, above, other_than


def _flags(kind: Kind, *fields: str) -> tuple[Flag, ...]:
    return tuple(Flag(name, (f"--{name.replace('_', '-')}",), kind) for name in fields)


FLAGS: tuple[Flag, ...] = (
    Flag("fp8", ("--fp8-format",)),
    Flag("fp4", ("--fp4-format",)),
    Flag("num_moe_experts", ("--num-experts",)),
    Flag("apply_rope_fusion", ("--no-rope-fusion",), "off"),
    Flag("masked_softmax_fusion", ("--no-masked-softmax-fusion",), "off"),
    Flag("bias_swiglu_fusion", ("--no-bias-swiglu-fusion",), "off"),
    Flag("bias_dropout_fusion", ("--no-bias-dropout-fusion",), "off"),
    Flag("gradient_accumulation_fusion", ("--no-gradient-accumulation-fusion",), "off"),
    *_flags(
        "value",
        "attention_backend",
        "attention_dropout",
        "context_parallel_size",
        "cuda_graph_impl",
        "expert_model_parallel_size",
        "hidden_dropout",
        "moe_expert_capacity_factor",
        "moe_input_jitter_eps",
        "moe_router_dtype",
        "moe_token_dispatcher_type",
        "mtp_num_layers",
        "pipeline_model_parallel_size",
        "recompute_granularity",
        "tensor_model_parallel_size",
        "transformer_impl",
    ),
    *_flags(
        "switch",
        "attention_softmax_in_fp32",
        "batch_invariant_mode",
        "cross_entropy_loss_fusion",
        "deterministic_mode",
        "enable_cuda_graph",
        "external_cuda_graph",
        "fp16",
        "fp16_lm_cross_entropy",
        "fp32_residual_connection",
        "moe_permute_fusion",
        "moe_router_force_load_balancing",
        "moe_router_fusion",
        "multi_latent_attention",
        "recompute_activations",
        "sequence_parallel",
        "tp_comm_overlap",
        "use_flash_attn",
    ),
)
"""Flags of Megatron's own scripts."""

JOB_FLAGS: tuple[Flag, ...] = (
    Flag("hook", ("--custom-megatron-before-log-prob-hook-path",)),
    Flag("variables", ("--train-env-vars",)),
    Flag("engine_ranks", ("--rollout-num-gpus-per-engine",)),
    Flag("hf_checkpoint", ("--hf-checkpoint",)),
    *_flags("switch", "allgather_cp", "keep_old_actor", "use_routing_replay"),
)
"""Flags of miles and slime."""

_FUSED = "changes last bits; hides no point"
_NOISE = "changes routes, and with them all later layers"

RULES: tuple[Rule, ...] = (
    Rule(
        "cuda_graph_impl",
        "CUDA graphs",
        "problem",
        "a replayed graph calls no hooks: points of captured layers are told as not seen",
        "--cuda-graph-impl none",
        other_than("none"),
    ),
    Rule(
        "enable_cuda_graph",
        "CUDA graphs",
        "problem",
        "a replayed graph calls no hooks: points of captured layers are told as not seen",
        "leave --enable-cuda-graph out",
    ),
    Rule(
        "external_cuda_graph",
        "CUDA graphs",
        "problem",
        "a replayed graph calls no hooks: points of captured layers are told as not seen",
        "leave --external-cuda-graph out",
    ),
    Rule(
        "fp8",
        "FP8",
        "note",
        "linear layers multiply in FP8: each errs by far more than bfloat16 loses, and is told so",
        "leave --fp8-format out, and compare",
    ),
    Rule(
        "fp4",
        "FP4",
        "note",
        "linear layers multiply in FP4: each errs by far more than bfloat16 loses, and is told so",
        "leave --fp4-format out, and compare",
    ),
    Rule(
        "fp16",
        "dtype",
        "note",
        "weights and activations are float16: the rollout's have to be as well",
        "--bf16 where the rollout serves bfloat16",
    ),
    Rule(
        "fp32_residual_connection",
        "residual stream",
        "note",
        "the stream is kept in float32 and rounds less; SGLang by default keeps the model's dtype",
    ),
    Rule(
        "fp16_lm_cross_entropy",
        "loss",
        "note",
        "Megatron's own loss is computed in half precision; a capture scores from the logits",
        "leave --fp16-lm-cross-entropy out",
    ),
    Rule(
        "cross_entropy_loss_fusion",
        "loss",
        "note",
        "Megatron's own loss comes from a fused kernel; a capture scores from the logits",
    ),
    Rule("attention_backend", "attention kernels", "note", _FUSED, when=other_than("auto")),
    Rule("use_flash_attn", "attention kernels", "note", _FUSED),
    Rule(
        "batch_invariant_mode",
        "batch invariance",
        "note",
        "matmuls, norms and attention do not depend on the batch: other last bits than without",
        "capture with what the job runs with",
    ),
    Rule(
        "context_parallel_size",
        "context parallel",
        "note",
        "each rank writes its chunks of a sequence, and they are joined on reading; forced routes "
        "(routes=) are refused. Tested on shards cut by Megatron's own helpers",
        when=above(1),
    ),
    Rule(
        "sequence_parallel",
        "sequence parallel",
        "note",
        "each rank writes its share of the rows, and they are joined on reading. Tested on shards "
        "cut by Megatron's own helpers",
    ),
    Rule(
        "recompute_granularity",
        "recomputation",
        "ok",
        "what is computed again for the backward is kept apart (docs/training.md); a log-prob "
        "forward recomputes nothing",
        tried=True,
    ),
    Rule(
        "recompute_activations",
        "recomputation",
        "ok",
        "what is computed again for the backward is kept apart (docs/training.md); a log-prob "
        "forward recomputes nothing",
        tried=True,
    ),
    Rule(
        "moe_router_force_load_balancing",
        "forced routes",
        "problem",
        "experts are chosen at random: routes, and all later layers, are no model's",
        "leave --moe-router-force-load-balancing out",
    ),
    Rule(
        "moe_expert_capacity_factor",
        "dropped tokens",
        "note",
        f"tokens beyond an expert's capacity are dropped: {_NOISE}; SGLang drops none",
        "leave --moe-expert-capacity-factor out",
        lambda value: float(value) > 0,
    ),
    Rule(
        "moe_input_jitter_eps",
        "router noise",
        "note",
        f"in training the router's input gets noise: {_NOISE}",
        "leave --moe-input-jitter-eps out",
        lambda value: float(value) > 0,
    ),
    Rule("moe_router_fusion", "fused kernels", "note", f"routing in one kernel: {_FUSED}"),
    Rule(
        "moe_permute_fusion",
        "fused kernels",
        "note",
        f"sorts rows in one kernel: {_FUSED}",
    ),
    Rule(
        "tp_comm_overlap",
        "overlapped sums",
        "note",
        "matmuls are cut into pieces to overlap with sums over ranks: changes last bits",
    ),
    Rule(
        "multi_latent_attention",
        "model",
        "problem",
        "latent attention is not recorded",
        "capture layer boundaries and log-probs alone (the default, `coarse`)",
    ),
    Rule(
        "mtp_num_layers",
        "multi-token prediction",
        "note",
        "its layers are not recorded; the model's own are",
        when=above(0),
    ),
    Rule(
        "keep_old_actor",
        "older actor",
        "problem",
        "the hook refuses it: it could not tell which weights score. Nothing is captured",
        "leave --keep-old-actor out",
        tried=True,
    ),
)
