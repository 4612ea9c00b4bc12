"""Faults of the KV cache and of packing."""

from __future__ import annotations

from scripts.planted.cache_forms import (
    DRAFTS_FROM,
    OLD_NOISE,
    SEVERAL_AGES,
    WARM,
    drafts_fed,
    drafts_read,
    everywhere,
    in_blocks,
    read_as,
    saturated,
    stale_prefix,
    tiles_in_fp8,
    underflown,
)
from scripts.planted.fault import Control, ModelFault, ScoreFault
from scripts.planted.packing_forms import across_documents, mispaired, tail_dropped

OFF_THE_TILE, SPLIT = 13, 8
"""A cached prefix whose length is no multiple of the keys that one split of attention holds."""

_KV: tuple[ModelFault, ...] = (
    ModelFault(
        name="stale-prefix-kv",
        component="kv_prefix_cache",
        operator="attention",
        point="attn.context",
        form=stale_prefix((OLD_NOISE,)),
        reports=("InternLM/lmdeploy#4917", "vllm-project/vllm-omni#6739"),
        description="a cached prefix outlives a weight update: its keys and values are old",
        passes="decode",
        changes=0.8,
    ),
    ModelFault(
        name="prefix-kv-of-several-ages",
        component="kv_prefix_cache",
        operator="attention",
        point="attn.context",
        form=everywhere(stale_prefix(SEVERAL_AGES)),
        reports=("NVIDIA-NeMo/RL#4018",),
        description="parts of a cached prefix are from weights of 17, 9 and 1 updates ago, in "
        "every layer",
        layers="all",
        passes="decode",
        changes=0.8,
    ),
    ModelFault(
        name="kv-scale-of-one-saturates",
        component="kv_prefix_cache",
        operator="attention",
        point="attn.context",
        form=read_as(saturated),
        reports=("NVIDIA-NeMo/RL#3225",),
        description="calibrated scales never reach the worker: large keys saturate in an e4m3 "
        "cache, which only decode reads",
        passes="decode",
        changes=0.8,
    ),
    ModelFault(
        name="kv-scale-of-one-underflows",
        component="kv_prefix_cache",
        operator="attention",
        point="attn.context",
        form=read_as(underflown),
        reports=("sgl-project/sglang#20705",),
        description="the backend overwrites the scales by one: small values fall among e4m3's "
        "subnormals",
        changes=0.9,
    ),
    ModelFault(
        name="kv-fp8-in-whole-tiles",
        component="kv_prefix_cache",
        operator="attention",
        point="attn.context",
        form=read_as(tiles_in_fp8),
        reports=("sgl-project/sglang#25790",),
        description="decode reads whole tiles of 32 keys from an e4m3 cache, the rest in the "
        "model's dtype",
        passes="decode",
        where=r"positions >= 3\d",
        changes=0.3,
    ),
    ModelFault(
        name="stale-drafts-read",
        component="kv_prefix_cache",
        operator="attention",
        point="attn.context",
        form=drafts_read(DRAFTS_FROM),
        reports=("vllm-project/vllm#38711",),
        description="near the largest length attention reads the state of draft tokens that were "
        "left behind",
        passes="decode",
        where=r"positions >= 6\d",
    ),
    ModelFault(
        name="stale-drafts-fed",
        component="kv_prefix_cache",
        operator="embedding",
        point="embed",
        form=drafts_fed(DRAFTS_FROM),
        reports=("vllm-project/vllm#38711",),
        description="near the largest length the token before the sampled one is fed",
        layers="none",
        passes="decode",
        where=r"positions >= 6\d",
    ),
    ModelFault(
        name="prefix-partials-in-bf16",
        component="kv_prefix_cache",
        operator="attention",
        point="attn.context",
        form=in_blocks(WARM, None, "bfloat16"),
        reports=("sgl-project/sglang#34683",),
        description="after a cached prefix attention merges two blocks of keys, whose outputs it "
        "keeps in bfloat16",
        where=rf"positions >= {WARM}\b",
        dtypes=("float32",),
        changes=0.5,
    ),
)

_PACKING: tuple[ModelFault | ScoreFault, ...] = (
    ModelFault(
        name="chunk-tails-dropped",
        component="packing",
        operator="attention",
        point="attn.context",
        form=tail_dropped,
        reports=("NVIDIA/TransformerEngine#3331",),
        description="context-parallel chunks of a padded sequence lose their last key and row",
        sides=("trainer",),
        changes=0.5,
    ),
    ModelFault(
        name="documents-attend-across",
        component="packing",
        operator="attention",
        point="attn.context",
        form=across_documents,
        reports=("NVIDIA/TransformerEngine#1259",),
        description="cu_seqlens is ignored: a packed document also attends to the one before it",
        changes=0.5,
    ),
    ScoreFault(
        name="samples-mispaired",
        component="packing",
        operator="inputs",
        columns=("C0", "C1"),
        change=mispaired,
        reports=("allenai/open-instruct#1473",),
        description="one response of six is scored with the logits of another sample",
    ),
)

FAULTS: tuple[ModelFault | ScoreFault, ...] = (*_KV, *_PACKING)

CONTROLS: tuple[Control, ...] = (
    Control(
        name="attention-in-two-blocks",
        description="attention after a cached prefix merges two blocks of keys",
        reports=("sgl-project/sglang#34683",),
        form=in_blocks(WARM, None),
    ),
    Control(
        name="attention-split-off-the-tile",
        description="a cached prefix is no multiple of the splits that attention reads keys in",
        reports=("sgl-project/sglang#10721",),
        form=in_blocks(OFF_THE_TILE, SPLIT),
    ),
    Control(
        name="packed-as-for-context-parallel",
        description="sequences packed into one row, of which only the backward was wrong",
        reports=("NVIDIA/TransformerEngine#2186",),
        layout="packed",
    ),
)
