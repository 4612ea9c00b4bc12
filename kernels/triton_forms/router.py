"""Top-k routing in Triton, one row a program: float32 scores, their choice and their weights.

The fast form sums a softmax over all experts in tiles that depend on the number of rows: with many
rows a program keeps few experts at once, with few rows all of them. Nothing else has an order that
could be chosen: up to 32 experts, with sigmoid scores, or with the softmax after top-k, both forms
give the same bits. Experts are compared by logits where no bias is added, and by float32 scores
with one; of equal ones the lower number wins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layerbisect.kernels.router import SUM_EPSILON, Scoring, require_routable
from layerbisect.kernels.triton_forms.common import Build, aligned

_FEW_EXPERTS = 32
_MANY_ROWS = 64


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    deterministic: bool,
    renormalise: bool,
    scoring: Scoring = "softmax",
    bias: torch.Tensor | None = None,
    softmax_after_top_k: bool = False,
    groups: int | None = None,
    top_groups: int | None = None,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts a row from ``logits`` [row, expert] of any float dtype.

    All else as the reference takes it. Returns weights float32 and IDs int64, both [row, slot].
    Raises ValueError for arguments that don't go together.
    """
    require_routable(
        logits,
        top_k,
        scoring=scoring,
        bias=bias,
        softmax_after_top_k=softmax_after_top_k,
        groups=groups,
        top_groups=top_groups,
    )
    rows, experts = logits.shape
    weights = logits.new_empty(rows, top_k, dtype=torch.float32)
    ids = logits.new_empty(rows, top_k, dtype=torch.int64)
    if not rows:
        return weights, ids
    few = not deterministic and rows >= _MANY_ROWS
    _route_kernel[(rows,)](
        aligned(logits),
        None if bias is None else aligned(bias),
        weights,
        ids,
        scaling,
        **_sizes(experts, top_k, groups or 1, top_groups or 1, few=few),
        SIGMOID=scoring == "sigmoid",
        AFTER=softmax_after_top_k,
        RENORMALISE=renormalise,
        EPSILON=SUM_EPSILON,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return weights, ids


def builds() -> list[Build]:
    """Return what to compile without a GPU: Qwen3-MoE, GPT-OSS and DeepSeek-V3."""
    tensors = {"logits": "*bf16", "weights": "*fp32", "ids": "*i64", "scaling": "fp32"}
    softmax = {"bias": None, "SIGMOID": False, "EPSILON": SUM_EPSILON}
    qwen = softmax | {"AFTER": False, "RENORMALISE": True}
    deepseek = {"SIGMOID": True, "AFTER": False, "RENORMALISE": True, "EPSILON": SUM_EPSILON}
    return [
        Build(
            "router softmax, deterministic",
            _route_kernel,
            tensors,
            _sizes(128, 8, 1, 1, few=False) | qwen,
            num_warps=1,
        ),
        Build(
            "router softmax, fast, many rows",
            _route_kernel,
            tensors,
            _sizes(128, 8, 1, 1, few=True) | qwen,
            num_warps=1,
        ),
        Build(
            "router softmax after top-k",
            _route_kernel,
            tensors,
            _sizes(32, 4, 1, 1, few=False) | softmax | {"AFTER": True, "RENORMALISE": False},
            num_warps=1,
        ),
        Build(
            "router sigmoid, groups",
            _route_kernel,
            tensors | {"logits": "*fp32", "bias": "*fp32"},
            _sizes(256, 8, 8, 4, few=False) | deepseek,
            num_warps=1,
        ),
    ]


def _sizes(experts: int, top_k: int, groups: int, top_groups: int, *, few: bool) -> dict[str, int]:
    whole = triton.next_power_of_2(experts)
    return {
        "EXPERTS": experts,
        "TOP_K": top_k,
        "SLOTS": triton.next_power_of_2(top_k),
        "SIZE": experts // groups,
        "PLACES": triton.next_power_of_2(experts // groups),
        "GROUPS": groups,
        "GROUP_PLACES": triton.next_power_of_2(groups),
        "TOP_GROUPS": top_groups,
        "TILE": min(whole, _FEW_EXPERTS) if few else whole,
    }


@triton.jit  # type: ignore[untyped-decorator]
def _route_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    scaling: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_PLACES: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    SIGMOID: tl.constexpr,
    AFTER: tl.constexpr,
    RENORMALISE: tl.constexpr,
    EPSILON: tl.constexpr,
) -> None:
    """Route one row, whose experts lie in a tile [group, place]."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * EXPERTS
    group = tl.arange(0, GROUP_PLACES)
    place = tl.arange(0, PLACES)[None, :]
    number = group[:, None] * SIZE + place
    real = (group < GROUPS)[:, None] & (place < SIZE)
    logit = tl.load(logits + number, mask=real, other=float("-inf")).to(tl.float32)

    if SIGMOID:
        # exp(-z) would overflow where z is very negative
        decayed = tl.exp(-tl.abs(logit))
        score = tl.where(logit < 0, decayed, 1) / (1 + decayed)
    elif AFTER:
        score = logit
    else:
        largest = tl.max(tl.max(logit, 1), 0)
        total = tl.zeros((TILE,), tl.float32)
        for start in range(0, EXPERTS, TILE):
            at = start + tl.arange(0, TILE)
            some = tl.load(logits + at, mask=at < EXPERTS, other=float("-inf"))
            total += tl.exp(some.to(tl.float32) - largest)
        score = tl.exp(logit - largest) / tl.sum(total, 0)

    choice = logit
    if bias is not None:
        choice = score + tl.load(bias + number, mask=real, other=0.0).to(tl.float32)
    # as torch sorts it
    choice = tl.where(choice == choice, choice, float("inf"))

    free = real
    if TOP_GROUPS < GROUPS:
        best = tl.max(tl.where(real, choice, float("-inf")), 1)
        if bias is not None and SIZE > 1:
            first = tl.min(tl.where(real & (choice == best[:, None]), place, PLACES), 1)
            others = real & (place != first[:, None])
            best += tl.max(tl.where(others, choice, float("-inf")), 1)
            best = tl.where(best == best, best, float("inf"))
        open_group = group < GROUPS
        for _ in range(TOP_GROUPS):
            ahead = tl.max(tl.where(open_group, best, float("-inf")), 0)
            found = tl.min(tl.where(open_group & (best == ahead), group, GROUP_PLACES), 0)
            open_group = open_group & (group != found)
        free = real & ~open_group[:, None]

    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int32)
    weight = tl.zeros((SLOTS,), tl.float32)
    for k in range(TOP_K):
        ahead = tl.max(tl.max(tl.where(free, choice, float("-inf")), 1), 0)
        found = tl.min(tl.min(tl.where(free & (choice == ahead), number, EXPERTS), 1), 0)
        # one number and zeros, so that the sum is exact
        scored = tl.sum(tl.sum(tl.where(real & (number == found), score, 0.0), 1), 0)
        chosen = tl.where(slot == k, found, chosen)
        weight = tl.where(slot == k, scored, weight)
        free = free & (number != found)

    used = slot < TOP_K
    if AFTER:
        weight = tl.where(used, weight, float("-inf"))
        weight = tl.exp(weight - tl.max(weight, 0))
        weight = weight / tl.sum(weight, 0)
    elif RENORMALISE:
        total = tl.sum(weight, 0)
        if SIGMOID:
            total += EPSILON
        weight = weight / total
    tl.store(weights + row * TOP_K + slot, weight * scaling, mask=used)
    tl.store(ids + row * TOP_K + slot, chosen.to(tl.int64), mask=used)
