"""What single settings of SGLang's server do to a capture.

Read in the sources of SGLang 0.5.23, and of the capture itself where a setting hides points.
"""

from __future__ import annotations

from layerbisect.doctor.rules import Rule, above, other_than

_PARTIAL = "each rank holds other rows than the capture expects: nothing is recorded where it is so"
_SUMS = "sums over ranks in another order: changes last bits"

RULES: tuple[Rule, ...] = (
    Rule(
        "enable_torch_compile",
        "torch.compile",
        "problem",
        "compiled modules call no hooks: their points are told as not seen",
        "leave --enable-torch-compile out",
    ),
    Rule(
        "quantization",
        "quantization",
        "problem",
        "weights are others than the checkpoint's: the reference has them in full, so that linear "
        "layers and experts err by what quantization loses; quantised checkpoints are refused",
        "serve the weights that the trainer has, without --quantization",
        other_than("unquant"),
    ),
    Rule(
        "modelopt_quant",
        "quantization",
        "problem",
        "weights are others than the checkpoint's, as with --quantization",
        "serve the weights that the trainer has, without --modelopt-quant",
    ),
    Rule(
        "kv_cache_dtype",
        "KV cache",
        "note",
        "keys and values are rounded to fewer bits as they are stored: attention errs by that "
        "wherever it reads them back, which no trainer does",
        "--kv-cache-dtype auto, and compare",
        other_than("auto", "bf16", "bfloat16"),
    ),
    Rule(
        "enable_two_batch_overlap",
        "two-batch overlap",
        "problem",
        f"the batch runs in two halves: {_PARTIAL}",
        "leave --enable-two-batch-overlap out",
    ),
    Rule(
        "enable_layernorm_sp",
        "sequence parallel",
        "problem",
        _PARTIAL,
        "leave --enable-layernorm-sp out",
    ),
    Rule(
        "enable_attn_tp_input_scattered",
        "scattered input",
        "problem",
        _PARTIAL,
        "leave --enable-attn-tp-input-scattered out",
    ),
    Rule(
        "enable_prefill_cp",
        "context parallel",
        "problem",
        _PARTIAL,
        "leave --enable-prefill-cp out",
    ),
    Rule(
        "attn_cp_size",
        "context parallel",
        "problem",
        _PARTIAL,
        "--attn-cp-size 1",
        above(1),
    ),
    Rule(
        "dcp_size",
        "context parallel",
        "note",
        "decode attention is cut over ranks, which the capture knows nothing of: attn.context of "
        "decode steps may be a part",
        "--dcp-size 1",
        above(1),
    ),
    Rule(
        "moe_a2a_backend",
        "experts' tokens travel",
        "problem",
        "tokens are sent to the ranks that hold their experts: all mlp points of MoE layers are "
        "told as not seen",
        "--moe-a2a-backend none",
        other_than("none"),
    ),
    Rule(
        "enable_eplb",
        "experts are moved",
        "problem",
        "the engine numbers places of experts, not experts: mlp.expert_ids is told as not seen",
        "leave --enable-eplb out",
    ),
    Rule(
        "ep_num_redundant_experts",
        "redundant experts",
        "problem",
        "the engine numbers places of experts, not experts: mlp.expert_ids is told as not seen",
        "--ep-num-redundant-experts 0",
        above(0),
    ),
    Rule(
        "init_expert_location",
        "experts are moved",
        "problem",
        "the engine numbers places of experts, not experts: mlp.expert_ids is told as not seen",
        "--init-expert-location trivial",
        other_than("trivial"),
    ),
    Rule(
        "enable_nvidia_megakernel",
        "fused kernels",
        "problem",
        "decode steps run in one kernel: their inner points are told as not seen",
        "leave --enable-nvidia-megakernel out",
    ),
    Rule(
        "enable_amd_monokernel",
        "fused kernels",
        "problem",
        "decode steps run in one kernel: their inner points are told as not seen",
        "leave --enable-amd-monokernel out",
    ),
    Rule(
        "enable_aiter_allreduce_fusion",
        "fused all-reduce",
        "note",
        "sums over ranks, adds to the stream and norms in one kernel: changes last bits; the "
        "stream is read where it is kept, so no layer boundary is hidden",
        "leave --enable-aiter-allreduce-fusion out, and compare",
    ),
    Rule(
        "enable_fused_qk_norm_rope",
        "fused q/k norm and RoPE",
        "note",
        "norm and rotation of q and k in one kernel, rounded once: changes last bits; attn.q and "
        "attn.k are read behind it",
        "--no-enable-fused-qk-norm-rope, and compare",
    ),
    Rule(
        "enable_fused_moe_sum_all_reduce",
        "fused expert sum",
        "note",
        "experts are summed as they are computed: changes last bits of mlp.out",
        "leave --enable-fused-moe-sum-all-reduce out, and compare",
    ),
    Rule(
        "enable_quant_communications",
        "sums over ranks",
        "note",
        "what ranks add up is rounded to INT8: attn.out and mlp.out lose far more than bfloat16 "
        "does",
        "leave --enable-quant-communications out",
    ),
    Rule("enable_mscclpp", "sums over ranks", "note", _SUMS),
    Rule("enable_torch_symm_mem", "sums over ranks", "note", _SUMS),
    Rule("enable_nccl_nvls", "sums over ranks", "note", _SUMS),
    Rule("disable_custom_all_reduce", "sums over ranks", "note", _SUMS),
    Rule(
        "enable_fp32_lm_head",
        "head in float32",
        "note",
        "logits are computed in float32: the trainer's have to be as well",
        "do the same in the trainer",
    ),
    Rule(
        "enable_tf32_matmul",
        "TF32",
        "note",
        "float32 matmuls keep 10 bits of their operands",
        "leave --enable-tf32-matmul out",
    ),
    Rule(
        "bf16_gemm_backend",
        "matmul kernels",
        "note",
        "another kernel for linear layers: another order of sums, last bits",
        "--bf16-gemm-backend torch, and compare",
        other_than("auto", "torch"),
    ),
    Rule(
        "triton_attention_reduce_in_fp32",
        "Triton attention",
        "note",
        "partial results of attention are kept in float32: changes last bits of attn.context",
    ),
    Rule(
        "triton_attention_num_kv_splits",
        "Triton attention",
        "note",
        "decode attention divides the context otherwise: changes last bits of attn.context",
        when=other_than("8"),
    ),
    Rule(
        "triton_attention_split_tile_size",
        "Triton attention",
        "note",
        "decode attention divides the context otherwise: changes last bits of attn.context",
    ),
    Rule(
        "dtype",
        "dtype",
        "note",
        "weights and activations have this dtype: the trainer's have to have the same",
        when=other_than("auto", "bfloat16"),
    ),
    Rule(
        "model_impl",
        "model",
        "problem",
        "points are known by the modules of SGLang's own models: nearly all are told as not seen",
        "--model-impl auto",
        other_than("auto", "sglang"),
    ),
    Rule(
        "json_model_override_args",
        "model",
        "note",
        "the reference reads the checkpoint's config.json, which does not have these",
        "write them into config.json",
        other_than("{}"),
    ),
    Rule(
        "load_format",
        "weights",
        "problem",
        "weights are random: no checkpoint has them, and bisect needs one",
        "leave --load-format dummy out",
        lambda value: value == "dummy",
    ),
    Rule(
        "disaggregation_mode",
        "disaggregation",
        "note",
        "prefill and decode are two servers: give each a LAYERBISECT_CAPTURE of its own; not tried",
        when=other_than("null"),
    ),
    Rule(
        "config",
        "settings in a file",
        "note",
        "this file is not read here: settings in it are not judged",
        "give them as flags, or ask the running server: `layerbisect doctor --server URL`",
        tried=True,
    ),
)
