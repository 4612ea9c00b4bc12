"""Single settings of SGLang's server that hide points, or keep a verdict from being right.

Read in the sources of SGLang 0.5.23, and of the capture itself.
"""

from __future__ import annotations

from layerbisect.doctor.rules import Rule, above, other_than

_PARTIAL = "each rank holds other rows than the capture expects: nothing is recorded where it is so"

HIDES: tuple[Rule, ...] = (
    Rule(
        "enable_torch_compile",
        "torch.compile",
        "problem",
        "hooks record nothing in compiled modules: their points are told as not seen",
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
        "moe_a2a_backend",
        "experts' tokens travel",
        "problem",
        "tokens are sent to the ranks that hold their experts: all mlp points are told as not seen",
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
        "model_impl",
        "model",
        "problem",
        "points are known by the modules of SGLang's own models: nearly all are told as not seen",
        "--model-impl auto",
        other_than("auto", "sglang"),
    ),
    Rule(
        "load_format",
        "weights",
        "problem",
        "weights are random: no checkpoint has them, and bisect needs one",
        "leave --load-format dummy out",
        lambda value: value == "dummy",
    ),
)
