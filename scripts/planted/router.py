"""Faults in the router's logits, and in the weights of the experts that it chose."""

from __future__ import annotations

from typing import Any

from layerbisect.fault_forms import router_low_precision, top_k_not_renormalised
from scripts.planted import router_forms as forms
from scripts.planted.fault import Control, ModelFault
from scripts.planted.routing_forms import everywhere


def _logits(name: str, form: Any, report: str, description: str, **more: Any) -> ModelFault:
    return ModelFault(
        name,
        "router_logits",
        "router",
        "mlp.router_logits",
        form,
        (report,),
        description,
        dense=None,
        **more,
    )


def _weights(
    name: str, form: Any, reports: tuple[str, ...], description: str, **more: Any
) -> ModelFault:
    return ModelFault(
        name,
        "routing_weights",
        "router",
        "mlp.expert_weights",
        form,
        reports,
        description,
        dense=None,
        **more,
    )


FAULTS: tuple[ModelFault, ...] = (
    _logits(
        "router-input-normed-again",
        forms.input_normed_again,
        "NVIDIA-NeMo/Automodel#1852",
        "the router's input is normed once more, without a weight",
        changes=0.9,
    ),
    _logits(
        "router-input-norm-weight-twice",
        forms.input_norm_weight_twice,
        "NVIDIA-NeMo/Automodel#1852",
        "the router's input is normed once more, with the norm's weight",
        changes=0.9,
    ),
    _logits(
        "router-in-bfloat16",
        forms.in_bfloat16,
        "vllm-project/vllm#14027",
        "the router of a float32 model computes in bfloat16",
        dtypes=("float32",),
        changes=0.9,
    ),
    _logits(
        "router-low-precision",
        router_low_precision,
        "vllm-project/vllm#14027",
        "the router reads its input in 8 bits (e4m3, one scale a tensor)",
        changes=0.9,
    ),
    _logits(
        "router-weight-4-bit",
        forms.weight_in_4_bits,
        "Avarok-Cybersecurity/atlas#186",
        f"the router's weight is quantised to 4 bits, {forms.FOUR_BIT_GROUP} channels a scale",
        changes=0.9,
    ),
    _weights(
        "routing-weights-bfloat16",
        forms.weights_in_bfloat16,
        ("vllm-project/vllm#49927",),
        "the weights of the right experts come from a softmax in bfloat16, in a float32 model",
        dtypes=("float32",),
        changes=0.9,
    ),
    _weights(
        "replayed-ids-new-weights",
        forms.weights_in_bfloat16_reordered,
        ("radixark/miles#2722",),
        "replayed experts, in another order of slots, get weights from a softmax in bfloat16",
        dtypes=("float32",),
        sides=("trainer",),
        changes=0.9,
    ),
    _weights(
        "top-k-not-renormalised",
        top_k_not_renormalised,
        ("pytorch/torchtitan#1448", "NVIDIA/Megatron-LM#1593"),
        "the weights of a token's experts do not add up to one, or do where they should not",
        changes=0.9,
    ),
    _weights(
        "raw-logits-as-weights",
        forms.raw_logits_as_weights,
        ("sgl-project/sglang#35160",),
        "the chosen experts are weighted with their logits, of which no softmax was taken",
        changes=0.9,
    ),
    _weights(
        "routing-weights-scaled",
        forms.weights_scaled,
        ("sgl-project/sglang-jax#1282",),
        f"one side alone scales the weights by {forms.SCALING:g}",
        changes=0.9,
    ),
    _weights(
        "weights-normalised-over-tokens",
        forms.weights_normed_over_tokens,
        ("databricks/megablocks#87",),
        "weights are normalised over the tokens of a call, not over a token's experts",
        changes=0.9,
    ),
)

CONTROLS: tuple[Control, ...] = tuple(
    Control(name, description, (report,), everywhere(form), dtypes=dtypes, moe_only=True)
    for name, form, report, description, dtypes in (
        (
            "router-in-float32",
            forms.in_float32,
            "vllm-project/vllm#14027",
            "the router of a bfloat16 model computes in float32 and does not round its logits",
            ("bfloat16",),
        ),
        (
            "experts-chosen-before-rounding",
            forms.chosen_before_rounding,
            "vllm-project/vllm#14027",
            "experts are chosen by logits that are not rounded yet, so near ties may flip",
            ("bfloat16",),
        ),
        (
            "routing-weights-by-bfloat16-softmax",
            forms.weights_in_bfloat16,
            "vllm-project/vllm#49927",
            "the weights come from a softmax in bfloat16, in a bfloat16 model",
            ("bfloat16",),
        ),
        (
            "replayed-ids-bfloat16-weights",
            forms.weights_in_bfloat16_reordered,
            "radixark/miles#2722",
            "the same experts in another order of slots, with weights from a bfloat16 softmax",
            ("bfloat16",),
        ),
        (
            "slots-in-another-order",
            forms.slots_reordered,
            "radixark/miles#2722",
            "a token's experts, with their weights, come least weight first",
            ("bfloat16", "float32"),
        ),
        (
            "softmax-after-top-k",
            forms.softmax_after_top_k,
            "NVIDIA/Megatron-LM#1593",
            "softmax over the chosen logits instead of over all and then renormalised",
            ("bfloat16", "float32"),
        ),
        (
            "router-gradient-detached",
            forms.gradient_detached,
            "huggingface/transformers#48687",
            "only the backward of the routing weights is wrong",
            ("bfloat16", "float32"),
        ),
    )
)
