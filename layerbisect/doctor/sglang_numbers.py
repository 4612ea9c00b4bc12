"""Single settings of SGLang's server that change numbers, or that are worth knowing.

Read in the sources of SGLang 0.5.23.
"""

from __future__ import annotations

from layerbisect.doctor.rules import Rule, above, other_than

_SUMS = "sums over ranks in another order: changes last bits"

NUMBERS: tuple[Rule, ...] = (
    Rule(
        "kv_cache_dtype",
        "KV cache",
        "note",
        "keys and values are rounded to fewer bits as they are stored: attention errs by that "
        "wherever it reads them back, and the trainer's does not",
        "--kv-cache-dtype auto, and compare",
        other_than("auto", "bf16", "bfloat16"),
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
        "norm and rotation of q and k in one kernel: changes last bits; attn.q and "
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
        "json_model_override_args",
        "model",
        "note",
        "the reference reads the checkpoint's config.json, which does not have these",
        "write them into config.json",
        other_than("{}"),
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
