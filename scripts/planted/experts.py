"""Faults in a layer's experts: which tokens they get, what they compute, how it is added up.

A capture of a transformers model shows what goes into the experts and what comes out of all of
them, so each of these first shows in ``mlp.out``.
"""

from __future__ import annotations

from typing import Any

from layerbisect.fault_forms import experts_swapped, gate_up_swapped
from scripts.planted import expert_forms as forms
from scripts.planted.fault import Control, ModelFault
from scripts.planted.router_forms import SCALING
from scripts.planted.routing_forms import everywhere


def _fault(
    name: str, component: str, form: Any, report: str, description: str, **more: Any
) -> ModelFault:
    more = {"dense": None, "changes": 0.9, **more}
    return ModelFault(name, component, "experts", "mlp.out", form, (report,), description, **more)


FAULTS: tuple[ModelFault, ...] = (
    _fault(
        "dummy-token-of-an-idle-expert",
        "dispatch_permutation",
        forms.dummy_token,
        "ROCm/Megatron-LM#155",
        "each expert without a token computes a call's first one, with weight 1",
        passes="decode",
        changes=0.1,
    ),
    _fault(
        "tokens-permuted-twice",
        "dispatch_permutation",
        forms.permuted_twice,
        "pytorch/torchtitan#1340",
        "what the experts put out is sorted by expert twice, and lands on other tokens",
        changes=0.5,
    ),
    _fault(
        "gate-up-swapped",
        "expert_mlp",
        gate_up_swapped,
        "nntrainer/nntrainer#4194",
        "the gate and up projections of the MLP are taken for one another",
        dense="linear",
    ),
    _fault(
        "experts-swapped",
        "expert_mlp",
        experts_swapped,
        "NVIDIA-NeMo/Megatron-Bridge#1817",
        "experts 0 and 1 compute for one another, as after an export in a wrong order",
        changes=0.1,
        where=r"expert (0|1)\b",
    ),
    _fault(
        "last-tile-dropped",
        "expert_mlp",
        forms.last_tile_dropped,
        "vllm-project/vllm#42436",
        f"the experts' down projections leave out what is no whole tile of {forms.TILE} channels",
    ),
    _fault(
        "swiglu-gate-clamped",
        "expert_mlp",
        forms.gate_clamped,
        "ByteDance-Seed/VeOmni#917",
        f"one side alone clamps the gate of the MLP to at most {forms.CLAMP:g}",
        dense="linear",
        changes=0.5,
    ),
    _fault(
        "activation-lost",
        "expert_mlp",
        forms.activation_lost,
        "NVIDIA-NeMo/Megatron-Bridge#2381",
        "the gate of the MLP is taken without its activation",
        dense="linear",
    ),
    _fault(
        "weights-of-another-token",
        "combine_accumulate",
        forms.weights_of_another_token,
        "ByteDance-Seed/Triton-distributed#133",
        "token m is combined with the weights that begin at m, not at m times top-k",
        changes=0.5,
    ),
    _fault(
        "expert-bias-unweighted",
        "combine_accumulate",
        forms.bias_unweighted,
        "NVIDIA-NeMo/Automodel#2591",
        "the biases of the experts' outputs are added without their weights",
    ),
    _fault(
        "shared-expert-partial",
        "combine_accumulate",
        forms.shared_expert_partial,
        "vllm-project/tpu-inference#3435",
        f"{forms.SHARED:g} of what a shared expert gives is missing",
    ),
    _fault(
        "routed-output-scaled",
        "combine_accumulate",
        forms.output_scaled,
        "sgl-project/sglang-jax#1282",
        f"one side alone scales what the experts put out by {SCALING:g}",
    ),
    _fault(
        "weights-on-experts-input",
        "routing_weights",
        forms.weights_on_input,
        "vllm-project/vllm#16744",
        "experts read their tokens times the weights, and their outputs are added without",
    ),
)

CONTROLS: tuple[Control, ...] = (
    Control(
        "experts-added-in-turn",
        "a token's experts are weighted and added in float32, from another slot on in each token",
        ("vllm-project/vllm#45683",),
        everywhere(forms.combined_in_turn),
        # two experts' sum is the same in any order, so in float32 top-2 would show the same bits
        dtypes=("bfloat16",),
        moe_only=True,
    ),
    Control(
        "weights-at-the-activation",
        "experts are weighted before their down projection, and added in order of experts",
        ("radixark/Megatron-LM#30",),
        everywhere(forms.weights_at_activation),
        moe_only=True,
    ),
)
