"""Faults of attention kernels that compute one new token over a longer KV cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from scripts.planted.attending import Attention, Change, at_attention
from scripts.planted.attention import with_sinks
from scripts.planted.fault import ModelFault

if TYPE_CHECKING:
    import torch

SPLIT = 16
"""Keys of a page, and of a split of the keys; engines have 16 to 256."""
LIMIT = 32
"""Keys up to which the kernel is right; 2048 in the report."""
PREFIX = 8
"""Keys that stand for the prefix that a batch shares."""
CASCADE_BATCH = 4
"""Sequences from which on cascade attention is taken; 8 in the engine."""
NAN_KEYS = 25
"""Keys at the step that goes wrong: the 17th after a prompt of 8."""

FROM_SPLIT = r"positions (>= )?1[5-9]\b"
FROM_LIMIT = r"positions (>= )?3[1-5]\b"


def _sink_each_split(a: Attention) -> torch.Tensor:
    # the first is right where a model has sinks; the others are too much
    return with_sinks(a, (a.keys - 1) // SPLIT)


def _nan(a: Attention) -> torch.Tensor:
    context = a.own()
    if a.keys != NAN_KEYS:
        return context
    context = context.clone()
    context[-1, :, 0] = math.nan
    return context


def _averaged_cascade(a: Attention) -> torch.Tensor:
    if a.keys <= PREFIX or len(a.q) < CASCADE_BATCH:
        return a.own()
    (prefix, suffix), _ = a.parts([0, PREFIX])
    return (prefix + suffix) / 2


def _next_page(a: Attention) -> torch.Tensor:
    import torch

    slots = torch.arange(a.keys, device=a.k.device)
    slots[SPLIT - 1 : -1 : SPLIT] += 1
    return a.own(k=a.k[:, :, slots], v=a.v[:, :, slots])


def _first_keys(a: Attention) -> torch.Tensor:
    mask = None if a.mask is None else a.mask[..., :LIMIT]
    return a.own(k=a.k[:, :, :LIMIT], v=a.v[:, :, :LIMIT], mask=mask)


def _random_keys(a: Attention) -> torch.Tensor:
    import torch

    if a.keys <= LIMIT:
        return a.own()
    # the same at each run, and others at each step
    draw = torch.Generator().manual_seed(a.keys)
    picked = torch.randperm(a.keys, generator=draw)[:LIMIT].sort().values.to(a.k.device)
    mask = None if a.mask is None else a.mask[..., picked]
    return a.own(k=a.k[:, :, picked], v=a.v[:, :, picked], mask=mask)


def _repeated_heads(a: Attention) -> torch.Tensor:
    context = a.own()
    heads = context.shape[2]
    return context[:, :, [head % ((heads + 1) // 2) for head in range(heads)]]


def _fault(
    name: str, change: Change, report: str, description: str, changes: float, where: str = ""
) -> ModelFault:
    return ModelFault(
        name=name,
        component="attention_core",
        operator="attention",
        point="attn.context",
        form=at_attention(change, when="decode"),
        reports=(report,),
        description=description,
        passes="decode",
        sides=("rollout",),
        where=where,
        changes=changes,
    )


FAULTS: tuple[ModelFault, ...] = (
    _fault(
        "attention-sink-in-each-split",
        _sink_each_split,
        "vllm-project/vllm-metal#550",
        "Each split of 16 keys but the first adds the heads' sinks to the denominator once more.",
        0.6,
        FROM_SPLIT,
    ),
    _fault(
        "split-kv-makes-nan",
        _nan,
        "pytorch/torchtitan#3235",
        "One head of one request is NaN at one decode step, and its later tokens with it.",
        0.002,
    ),
    _fault(
        "cascade-averages-its-parts",
        _averaged_cascade,
        "vllm-project/vllm#22103",
        "In batches, prefix and suffix are averaged and not weighed by their log-sum-exps.",
        0.7,
    ),
    _fault(
        "kv-page-reads-the-next",
        _next_page,
        "Dao-AILab/flash-attention#2368",
        "The last row of each full page of 16 keys is read from the page after it.",
        0.6,
        FROM_SPLIT,
    ),
    _fault(
        "decode-ignores-keys-past-a-limit",
        _first_keys,
        "vllm-project/vllm#39303",
        "Decoding attends to the first 32 keys alone.",
        0.3,
        FROM_LIMIT,
    ),
    _fault(
        "decode-picks-keys-at-random-past-a-limit",
        _random_keys,
        "vllm-project/vllm#39303",
        "Beyond 32 keys, decoding attends to 32 that are picked at random.",
        0.3,
        FROM_LIMIT,
    ),
    _fault(
        "decode-repeats-the-first-heads",
        _repeated_heads,
        "sgl-project/sglang#19247",
        "The second half of the heads gets the first half's attention output in decoding.",
        0.8,
        r"heads? \d",
    ),
)
