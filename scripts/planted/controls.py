"""Controls: what engines do otherwise and may do, so that nobody may be accused of it.

Layouts and settings of the engine, forms that sum in another order or keep more digits, and other
dtypes. Modules of faults have further controls of their own kind.
"""

from __future__ import annotations

from pathlib import Path

import torch

from layerbisect.models import make_tiny
from scripts.planted import control_forms as forms
from scripts.planted import control_kernels as kernels
from scripts.planted.fault import DTYPES, Control, Form

NARROW = ("bfloat16",)
TIE = 0.03
"""How far apart the router weights of two neighbouring experts are, as a share of them."""


def _setting(name: str, description: str, **settings: str) -> Control:
    moe_only = "experts" in settings
    return Control(name, description, settings=settings, moe_only=moe_only)


def _layout(name: str, layout: str, description: str, **settings: str) -> Control:
    return Control(name, description, layout=layout, settings=settings)


def _form(
    name: str,
    form: Form,
    description: str,
    *,
    dtypes: tuple[str, ...] = DTYPES,
    moe_only: bool = False,
) -> Control:
    return Control(name, description, form=form, dtypes=dtypes, moe_only=moe_only)


SETTINGS = (
    _setting("attention-eager", "attention written out in torch", attention="eager"),
    _setting("attention-sdpa", "torch's own attention", attention="sdpa"),
    _setting("experts-eager", "experts one after the other", experts="eager"),
    _setting("experts-grouped", "tokens sorted by expert", experts="grouped_mm"),
    _setting("experts-batched", "one multiplication a token and slot", experts="batched_mm"),
    _setting(
        "sdpa-and-batched-experts", "both are other implementations",
        attention="sdpa", experts="batched_mm",
    ),
)  # fmt: skip

LAYOUTS = (
    _layout("padded-left", "padded", "all padded on the left", pad="left"),
    _layout("padded-right", "padded", "all padded on the right", pad="right"),
    _layout("padded-pairs", "padded", "padded two by two", batch="2"),
    _layout("packed-pairs", "packed", "packed two by two", batch="2"),
    _layout("packed-reversed", "packed", "all packed, the last first", order="reversed"),
    _layout("batch-of-two", "single", "two sequences a call", batch="2"),
    _layout("batch-of-all", "single", "all sequences in one call", batch="6"),
    _layout("order-reversed", "single", "the last sequence first", order="reversed"),
    _layout("mask-of-ones", "single", "a mask that hides nothing", mask="ones"),
    _layout("each-sequence-twice", "single", "each sequence, and it again", copies="2", batch="4"),
    _layout("chunks-of-seven", "chunked prefill", "prefill in chunks of 7", chunk="7"),
    _layout("chunks-of-sixteen", "chunked prefill", "prefill in chunks of 16", chunk="16"),
    _layout("steps-of-four", "chunked prefill", "four tokens a step, as with drafts", chunk="4"),
    _layout("filling-a-cache", "chunked prefill", "one prefill that fills a KV cache", chunk="64"),
    _layout(
        "chunks-of-batches", "chunked prefill", "a batch of three in chunks", chunk="16", batch="3"
    ),
    _layout("decoded-alone", "decode", "decoded one by one"),
    _layout("decoded-together", "batched decode", "decoded all at once"),
    _layout("decoded-pairs", "batched decode", "decoded in pairs", batch="2", order="reversed"),
    _layout(
        "decoded-after-ragged-prompts", "batched decode",
        "decoded at once after prompts of several lengths, padded on the left", prompts="ragged",
    ),
    _layout("static-cache", "batched decode", "a KV cache of fixed length", cache="static"),
)  # fmt: skip

OTHER_DTYPES = (
    Control("float16-engine", "one side computes in float16", dtype="float16"),
    Control(
        "bfloat16-engine", "one side computes in bfloat16, the other in float32",
        dtype="bfloat16", dtypes=("float32",),
    ),
)  # fmt: skip

SUMS = (
    _form("linears-in-halves", forms.linears(forms.in_parts(2)),
          "projections sum two halves of their input in float32"),
    _form("linears-in-quarters", forms.linears(forms.in_parts(4)),
          "projections sum four parts of their input in float32"),
    _form("linears-backwards", forms.linears(forms.backwards),
          "projections sum from the last channel to the first"),
    _form("linears-in-float64", forms.linears(forms.exact),
          "projections accumulate in float64"),
    _form("linears-transposed", forms.linears(forms.transposed),
          "projections multiply weights by rows"),
    _form("column-parallel-linears", forms.linears(forms.by_column_shards),
          "projections compute two halves of their outputs apart"),
    _form("head-in-halves", forms.head(forms.in_parts(2)),
          "the head sums two halves of its input in float32"),
    _form("head-in-float64", forms.head(forms.exact),
          "the head accumulates in float64"),
    _form("vocabulary-parallel-head", forms.head(forms.by_column_shards),
          "the head computes two halves of the vocabulary apart"),
    _form("router-in-halves", forms.routers(forms.in_parts(2)),
          "routers sum two halves of their input in float32", moe_only=True),
    _form("norms-by-halves", forms.norms(forms.mean_by_halves),
          "norms sum even channels, then odd ones"),
    _form("norms-in-float64", forms.norms(forms.mean_in_float64),
          "norms sum in float64"),
    _form("norms-divided-by-root", forms.norms(forms.divided_by_root),
          "norms divide by a root instead of multiplying by its inverse"),
    _form("residual-in-float32", forms.wide_residual,
          "the residual stream stays in float32", dtypes=NARROW),
    _form("rope-in-float32", forms.rope(torch.float32, rounded=False),
          "cosines, sines and rotation are in float32, and rounded once", dtypes=NARROW),
    _form("rope-angles-in-float64", forms.rope(torch.float64, rounded=True),
          "angles, cosines and sines come from float64"),
)  # fmt: skip

ATTENTION = (
    _form("attention-with-running-maximum", kernels.attention(kernels.online),
          "attention goes through blocks of 16 keys with a running maximum"),
    _form("attention-keys-backwards", kernels.attention(kernels.keys_backwards),
          "softmax and sums go through the keys in another order"),
    _form("attention-to-base-two", kernels.attention(kernels.base_two),
          "softmax by powers of two"),
    _form("attention-normalised-last", kernels.attention(kernels.unnormalised),
          "values are summed by exponentials, and divided by their sum at last"),
    _form("attention-scales-queries", kernels.attention(kernels.scaled_queries),
          "queries are scaled, and not scores"),
    _form("attention-in-float64", kernels.attention(kernels.in_float64),
          "attention in float64, rounded once"),
)  # fmt: skip

EXPERTS = (
    _form("experts-backwards", kernels.experts(kernels.backwards),
          "experts are added up in float32, the last first", moe_only=True),
    _form("experts-in-any-order", kernels.experts(kernels.AnyOrder()),
          "experts are added up in another order each time: runs do not repeat", moe_only=True),
    _form("experts-in-halves", kernels.experts(parts=2),
          "down projections sum two halves of an expert's width in float32", moe_only=True),
    _form("experts-all-computed", kernels.all_experts,
          "every token goes through every expert, with weight 0 where it was not sent",
          moe_only=True),
    _form("swiglu-fused", kernels.fused_swiglu,
          "gate, activation and product are rounded once", dtypes=NARROW),
    _form("silu-by-tanh", kernels.silu_by_tanh,
          "SiLU by a hyperbolic tangent"),
)  # fmt: skip

RUNTIME = (
    _form("without-onednn", forms.without_onednn, "torch's own matrix multiplications"),
    _form("with-gradients", forms.with_gradients, "a forward that records for a backward"),
    _form(
        "all-sums-otherwise",
        forms.together(
            forms.linears(forms.in_parts(2)), forms.head(forms.in_parts(2)),
            forms.norms(forms.mean_by_halves), kernels.attention(kernels.online),
        ),
        "projections, head, norms and attention all sum in another order",
    ),
    Control(
        "everything-otherwise",
        "sums in other orders, sdpa, batched experts, and decode in ragged batches",
        form=forms.together(
            forms.linears(forms.backwards), forms.norms(forms.mean_by_halves),
            forms.rope(torch.float64, rounded=True),
        ),
        layout="batched decode",
        settings={"attention": "sdpa", "experts": "batched_mm", "prompts": "ragged"},
    ),
)  # fmt: skip

CONTROLS: tuple[Control, ...] = (
    *SETTINGS, *LAYOUTS, *OTHER_DTYPES, *SUMS, *ATTENTION, *EXPERTS, *RUNTIME,
)  # fmt: skip


def make_near_tied(directory: Path, *, top_k: int = 3, layers: int = 3) -> Path:
    """Write a small Qwen3-MoE whose experts 0 and 1, 2 and 3, ... nearly tie in every router.

    With an odd ``top_k`` nearly every token has a pair that is cut in two, and two engines that
    round differently choose apart: a scene of it is a control by itself.
    """
    make_tiny(
        directory, layers=layers, hidden=128, heads=4, kv_heads=2, head_dim=32, experts=8,
        top_k=top_k, vocab=512,
    )  # fmt: skip
    tie_routers(directory)
    return directory


def tie_routers(directory: Path) -> None:
    """Let experts 0 and 1, 2 and 3, ... nearly tie in every router of a checkpoint."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    weights = load_file(file)
    for name, gate in weights.items():
        if name.endswith("mlp.gate.weight"):
            near = gate[::2].float() + TIE * gate[1::2].float()
            gate[1::2] = near.to(gate.dtype)
    save_file(weights, file, metadata={"format": "pt"})
