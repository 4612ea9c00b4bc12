"""Faults between the queries, keys and values that attention is given and its context."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from layerbisect.fault_attention import softmax_scale
from scripts.planted.attending import Attention, at_attention, several_kv_heads
from scripts.planted.fault import Control, ModelFault

if TYPE_CHECKING:
    import torch

YARN_FACTOR = 40
PAD_ROWS = 2
EVERY, ZERO = 7, 3
BLOCK = 16
"""Keys that a kernel sums before it merges them with those before."""


def _mscale(all_dim: float) -> float:
    """The factor that YaRN puts on the softmax scale, as DeepSeek's models have it."""
    return (0.1 * all_dim * math.log(YARN_FACTOR) + 1) ** 2


def _wrong_mscale(a: Attention) -> torch.Tensor:
    return a.own(scaling=a.scaling * _mscale(0.707) / _mscale(1.0))


def _no_mscale(a: Attention) -> torch.Tensor:
    return a.own(scaling=a.scaling / _mscale(0.707))


def with_sinks(a: Attention, times: int = 1) -> torch.Tensor:
    """Add each head's sink logit, so many times, to the softmax's denominator."""
    import torch

    if not times:
        return a.own()
    # as large as scores are; exact in bfloat16
    sinks = torch.tensor([1 - (head % 4) / 2 for head in range(a.q.shape[1])])
    # a key of zeros scores nothing but what is added, and a value of zeros adds nothing
    nothing = torch.zeros_like(a.k[:, :, :1]).expand(-1, -1, times, -1)
    return a.with_keys(nothing, nothing, sinks[:, None].expand(-1, times))


def _zero_rows(a: Attention) -> torch.Tensor:
    context = a.own().clone()
    context[:, a.positions % EVERY == ZERO] = 0
    return context


def _misread_layout(a: Attention) -> torch.Tensor:
    def misread(heads: torch.Tensor) -> torch.Tensor:
        return heads.transpose(1, 2).contiguous().view(heads.shape)

    return a.own(k=misread(a.k), v=misread(a.v))


def _zigzag(a: Attention) -> torch.Tensor:
    import torch

    if a.q.shape[2] != a.keys:
        return a.own()
    # of two ranks the first holds parts 0 and 3 of 4, the second 1 and 2
    parts = torch.arange(a.keys, device=a.q.device).tensor_split(4)
    place = torch.cat([parts[n] for n in (0, 3, 1, 2)]).argsort()
    return a.seeing((place <= place[:, None])[None, None])


def _stale_last_rows(a: Attention) -> torch.Tensor:
    context = a.own().contiguous().clone()
    rows = context.flatten(0, 1)
    if len(rows) > PAD_ROWS:
        # what the buffer held before: here the first rows of the same call
        rows[-PAD_ROWS:] = rows[:PAD_ROWS].clone()
    return rows.view(context.shape)


def _coarse_probabilities(a: Attention) -> torch.Tensor:
    return a.summed(a.scores().softmax(-1).bfloat16().float())


def _coarse_scores(a: Attention) -> torch.Tensor:
    return a.summed(a.scores().bfloat16().float().softmax(-1))


def _coarse_sums(a: Attention) -> torch.Tensor:
    """Scores whose running sum over channels is rounded to bfloat16 at each of them."""
    import torch

    q, k = a.q.float(), a.k.float().repeat_interleave(a.q.shape[1] // a.k.shape[1], 1)
    scores = torch.zeros(*q.shape[:3], a.keys, device=q.device)
    for channel in range(q.shape[3]):
        product = q[..., channel, None] * k[..., None, :, channel]
        scores = (scores + product).bfloat16().float()
    scores = (scores * a.scaling).masked_fill(~a.allowed(), -math.inf)
    return a.summed(scores.softmax(-1))


def _merged_blocks(a: Attention) -> torch.Tensor:
    import torch

    parts, sizes = a.parts(list(range(0, a.keys, BLOCK)))
    return (torch.stack(parts) * sizes.softmax(0)).sum(0)


FAULTS: tuple[ModelFault, ...] = (
    ModelFault(
        name="softmax-scale-of-another-mscale",
        component="attention_core",
        operator="attention",
        point="attn.context",
        form=at_attention(_wrong_mscale),
        reports=("NVIDIA/Megatron-LM#1429",),
        description="The softmax scale has YaRN's mscale of 0.707 where the model's is 1.0.",
        changes=0.9,
    ),
    ModelFault(
        name="softmax-scale-without-mscale",
        component="attention_core",
        operator="attention",
        point="attn.context",
        form=at_attention(_no_mscale),
        reports=("onnxruntime/mobius#548",),
        description="The softmax scale lacks YaRN's factor of 1.59.",
        changes=0.9,
    ),
    ModelFault(
        name="softmax-scale",
        component="attention_core",
        operator="attention",
        point="attn.context",
        form=softmax_scale,
        reports=("NVIDIA/Megatron-LM#1429",),
        description="The softmax scale is 3% too large, as where two mscales are nearly alike.",
        changes=0.9,
    ),
    ModelFault(
        name="attention-sink-on-one-side",
        component="attention_core",
        operator="attention",
        point="attn.context",
        form=at_attention(with_sinks),
        reports=("radixark/miles#1500", "verl-project/verl#3894"),
        description="Every head's softmax has a sink that the other engine and the model lack.",
        changes=1.0,
    ),
    ModelFault(
        name="attention-rows-zeroed",
        component="attention_core",
        operator="attention",
        point="attn.context",
        form=at_attention(_zero_rows),
        reports=("flashinfer-ai/flashinfer#1489",),
        description="Every seventh position's attention output is zero.",
        changes=0.1,
    ),
    ModelFault(
        name="kv-layout-misread",
        component="attention_core",
        operator="attention",
        point="attn.context",
        form=at_attention(_misread_layout, needs=several_kv_heads),
        reports=("InternLM/lmdeploy#2957",),
        description="Keys and values laid out by token and head are read as by head and token.",
        changes=0.7,
    ),
    ModelFault(
        name="zigzag-read-as-packed",
        component="attention_core",
        operator="attention",
        point="attn.context",
        form=at_attention(_zigzag, when="prefill"),
        reports=("radixark/miles#885",),
        description="Tokens in the zigzag order of context parallelism are taken as consecutive.",
        sides=("trainer",),
        changes=0.6,
    ),
    ModelFault(
        name="padded-rows-out-of-lengths",
        component="attention_core",
        operator="attention",
        point="attn.context",
        form=at_attention(_stale_last_rows),
        reports=("sgl-project/sglang#10414",),
        description="The lengths leave out the last two rows of a batch, which stay as they were.",
        sides=("rollout",),
        changes=0.03,
    ),
    ModelFault(
        name="attention-probabilities-in-bf16",
        component="attention_core",
        operator="attention",
        point="attn.context",
        form=at_attention(_coarse_probabilities),
        reports=("alibaba/Pai-Megatron-Patch#289",),
        description="Probabilities are rounded to bfloat16 before they weigh the values.",
        dtypes=("float32",),
        changes=0.9,
    ),
    ModelFault(
        name="attention-scores-summed-in-bf16",
        component="attention_core",
        operator="attention",
        point="attn.context",
        form=at_attention(_coarse_sums, when="prefill"),
        reports=("flashinfer-ai/flashinfer#736",),
        description="In prefill alone, the sum over channels of a score is kept in bfloat16.",
        passes="prefill",
        sides=("rollout",),
        dtypes=("float32",),
        changes=0.9,
    ),
)

CONTROLS: tuple[Control, ...] = (
    Control(
        name="attention-probabilities-rounded",
        description="Probabilities are rounded to bfloat16, as kernels in bfloat16 do.",
        reports=("alibaba/Pai-Megatron-Patch#289",),
        form=at_attention(_coarse_probabilities),
        dtypes=("bfloat16",),
    ),
    Control(
        name="attention-scores-rounded",
        description="Scores are rounded to bfloat16 once, as eager attention in bfloat16 does.",
        reports=("alibaba/Pai-Megatron-Patch#289",),
        form=at_attention(_coarse_scores),
        dtypes=("bfloat16",),
    ),
    Control(
        name="attention-merged-from-blocks",
        description="Attention over blocks of keys, merged rightly by their log-sum-exps.",
        reports=("vllm-project/vllm#22103",),
        form=at_attention(_merged_blocks),
    ),
)

NOT_PLANTED: dict[str, str] = {}
