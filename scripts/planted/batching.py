"""Faults of batching, graphs and dropout, and the roundings that depend on batch and shape."""

from __future__ import annotations

from scripts.planted.batching_forms import (
    attention_dropout,
    attention_split_by_batch,
    experts_split,
    hidden_dropout,
    linear_split,
    norm_split,
    positions_not_refreshed,
)
from scripts.planted.cache_forms import everywhere
from scripts.planted.fault import Control, ModelFault

FAULTS: tuple[ModelFault, ...] = (
    ModelFault(
        name="expert-partials-in-8-bits",
        component="batching_nondeterminism",
        operator="experts",
        point="mlp.out",
        form=experts_split("float8_e4m3fn"),
        reports=("vllm-project/vllm#32480",),
        description="with several tokens in a call experts add partial sums that waited in e4m3, "
        "which is a few hundredths off",
        dense=None,
        changes=0.9,
    ),
    ModelFault(
        name="norm-partials-in-bf16",
        component="batching_nondeterminism",
        operator="norm",
        point="attn.norm",
        form=norm_split("bfloat16"),
        reports=("vllm-project/vllm#48271",),
        description="with many tokens in a call the norm adds two partial means in bfloat16",
        passes="prefill",
        dtypes=("float32",),
        changes=0.8,
    ),
    ModelFault(
        name="graph-keeps-positions",
        component="batching_nondeterminism",
        operator="rope",
        point="attn.q",
        form=positions_not_refreshed,
        reports=("vllm-project/vllm#55238",),
        description="a replayed graph keeps the positions of the step before in every fourth step",
        layers="all",
        passes="decode",
        changes=0.1,
    ),
    ModelFault(
        name="hidden-dropout-left-on",
        component="batching_nondeterminism",
        operator="residual",
        point="mid",
        form=everywhere(hidden_dropout),
        reports=("icip-cas/AutoAlign#62",),
        description="the trainer drops a tenth of what every attention and MLP adds to the stream",
        layers="all",
        sides=("trainer",),
        changes=1.0,
    ),
    ModelFault(
        name="attention-dropout-left-on",
        component="batching_nondeterminism",
        operator="attention",
        point="attn.context",
        form=attention_dropout,
        reports=("icip-cas/AutoAlign#62",),
        description="the trainer drops a tenth of a layer's attention probabilities",
        sides=("trainer",),
        changes=0.9,
    ),
)

CONTROLS: tuple[Control, ...] = (
    Control(
        name="projection-split-by-length",
        description="a projection adds two partial sums in long calls and one in short ones",
        reports=("verl-project/verl#3487",),
        form=linear_split,
    ),
    Control(
        name="norm-split-by-tokens",
        description="a norm adds two partial means where there are many tokens",
        reports=("vllm-project/vllm#48271",),
        form=norm_split("float32"),
    ),
    Control(
        name="experts-split-by-batch",
        description="experts split their products where there are several tokens",
        reports=("vllm-project/vllm#32480",),
        form=experts_split("float32"),
        moe_only=True,
    ),
    Control(
        name="prompts-batched",
        description="sequences run in one padded batch and not alone",
        reports=("vllm-project/vllm#11778",),
        layout="padded",
    ),
    Control(
        name="attention-split-by-batch",
        description="attention reads keys in blocks whose length depends on the batch",
        reports=("thinking-machines-lab/batch_invariant_ops#6",),
        form=attention_split_by_batch,
        layout="batched decode",
    ),
)
