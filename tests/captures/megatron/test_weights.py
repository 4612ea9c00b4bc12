"""Weights of the real megatron-core in many layouts: loaded, saved, compared with checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from layerbisect.bisect.weight_diff.compare import compare
from layerbisect.bisect.weight_diff.report import WeightReport
from layerbisect.captures.fingerprint import fingerprint
from layerbisect.captures.weights.store import WeightSnapshot
from layerbisect.models import make_tiny
from scripts.megatron_engine import run_job
from scripts.megatron_model import Layout
from tests.bisect.weight_diff.making import updated, write_checkpoint

pytest.importorskip("megatron")

VOCAB = 500
SIZES: dict[str, Any] = dict(layers=4, hidden=64, head_dim=8, experts=4, top_k=2, vocab=VOCAB)
TOKENS = torch.randint(VOCAB, (4, 24), generator=torch.Generator().manual_seed(0)).tolist()
SAVE = "tests.captures.megatron.weight_steps:save"
CLEAN_GAP = 0.006
"""Bound of the mean gap between the engines in bf16, as a share of the mean log-prob.

It is about 0.002 on these models, and 0.04 or more with one of the faults below in one layer.
"""


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("moe") / "before", heads=8, kv_heads=4, **SIZES)


@pytest.fixture(scope="module")
def after(moe: Path) -> Path:
    """The MoE model one optimizer step later."""
    config = json.loads((moe / "config.json").read_text())
    held = load_file(moe / "model.safetensors")
    return write_checkpoint(moe.parent / "after", updated(held), config)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of fewer query groups than the ranks of the widest layout below."""
    folder = tmp_path_factory.mktemp("dense") / "model"
    return make_tiny(folder, "qwen3", heads=8, kv_heads=2, **SIZES)


@pytest.fixture(scope="module")
def tied(dense: Path) -> Path:
    """The dense model with its embedding as the head."""
    config = json.loads((dense / "config.json").read_text()) | {"tie_word_embeddings": True}
    held = load_file(dense / "model.safetensors")
    del held["lm_head.weight"]
    return write_checkpoint(dense.parent / "tied", held, config)


def gap(model: Path, scored: Any) -> float:
    """Mean difference from transformers' log-probs, as a share of their mean."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    ids = torch.tensor(TOKENS)
    with torch.no_grad():
        logits = reference(ids).logits.float().log_softmax(-1)
    expected = logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return float((torch.tensor(scored) - expected).abs().mean() / expected.abs().mean())


def check_same(snapshot: Path, checkpoint: Path) -> None:
    """Check that a snapshot is whole, and every tensor of it bitwise the checkpoint's."""
    held = load_file(checkpoint / "model.safetensors")
    report = compare(checkpoint, snapshot)
    assert report, report.reasons
    assert report.coverage.same == report.coverage.tensors == len(held)
    read = WeightSnapshot.open(snapshot)
    assert read.problems == () and read.left_out == {} and read.names() == tuple(sorted(held))
    assert read.info.engine == "megatron-core"
    for name, whole in held.items():
        made = read.tensor(name)
        assert made.disagreements == () and made.values.dtype == whole.dtype
        assert torch.equal(made.values.view(torch.int16), whole.view(torch.int16)), name


def step(checkpoint: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {"do": SAVE, "checkpoint": str(checkpoint), "out": str(out), "vocab": VOCAB, **more}


def only_group(report: WeightReport) -> tuple[str, str, set[str]]:
    (group,) = report.groups
    return group.kind, group.side, set(group.names)


LAYOUTS = {
    "one rank": Layout(),
    "TP 2": Layout(tensor=2),
    "EP 2": Layout(expert=2),
    "PP 2 in 4 chunks": Layout(pipeline=2, virtual=2),
    "PP 2 x EP 2": Layout(pipeline=2, expert=2),
    "TP 2 x EP 2, whole experts": Layout(tensor=2, expert=2, expert_tensor=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_ranks_hold_is_the_checkpoint_and_faults_are_named(
    layout: Layout, moe: Path, after: Path, tmp_path: Path
) -> None:
    names = ("clean", "digests", "stale", "experts", "packed")
    clean, digests, stale, experts, packed = (tmp_path / name for name in names)
    forward = {"do": "forward", "tokens": TOKENS}
    steps = [
        step(moe, clean, version="step-7"),
        forward,
        step(moe, digests, values=False),
        step(after, stale, layer=2, fault="stale layer"),
        step(after, experts, layer=1, fault="swapped experts"),
        step(after, packed, layer=3, fault="not interleaved"),
        forward,
    ]
    results = run_job({"model": str(moe), "steps": steps}, layout)
    held = load_file(moe / "model.safetensors")

    check_same(clean, moe)
    assert WeightSnapshot.open(clean).info.weight_version == "step-7"
    assert gap(moe, results[0][1]) < CLEAN_GAP < 4 * CLEAN_GAP < gap(moe, results[0][-1])
    report = compare(moe, digests)
    assert report and report.coverage.same == len(held)
    seen = {name: made for of_rank in results for name, made in of_rank[0].items()}
    assert seen.items() <= {name: fingerprint(whole) for name, whole in held.items()}.items()
    whole = len(seen) == len(held)
    assert whole == (layout.tensor == 1) and "model.layers.3.mlp.gate.weight" in seen

    report = compare(after, stale, previous=moe)
    kind, side, found = only_group(report)
    assert (kind, side) == ("stale", "trainer")
    # the update leaves the norms as they are
    moved = {n for n, t in load_file(after / "model.safetensors").items() if (t != held[n]).any()}
    assert found == {n for n in moved if n.startswith("model.layers.2.")} and len(found) > 16
    kind, side, found = only_group(compare(after, experts, previous=moe))
    assert (kind, side) == ("swapped", "trainer")
    assert {name.partition("_proj")[0].rpartition(".")[0] for name in found} == {
        f"model.layers.1.mlp.experts.{n}" for n in (0, 1)
    }
    report = compare(after, packed, previous=moe)
    kind, side, found = only_group(report)
    assert (kind, side) == ("permuted", "trainer")
    assert "q_proj+k_proj+v_proj packed by shard" in report.groups[0].how
    assert found == {f"model.layers.3.self_attn.{n}_proj.weight" for n in "qkv"}


DENSE_LAYOUTS = {
    "one rank": Layout(),
    # more ranks than query groups: each holds a stretch of one
    "TP 4": Layout(tensor=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", DENSE_LAYOUTS.values(), ids=DENSE_LAYOUTS)
def test_a_dense_model_is_the_checkpoint(layout: Layout, dense: Path, tmp_path: Path) -> None:
    steps = [step(dense, tmp_path / "s"), {"do": "forward", "tokens": TOKENS}]
    results = run_job({"model": str(dense), "steps": steps}, layout)
    check_same(tmp_path / "s", dense)
    assert gap(dense, results[0][1]) < CLEAN_GAP


@pytest.mark.slow
def test_a_tied_head_is_a_copy_of_the_embedding(tied: Path, tmp_path: Path) -> None:
    steps = [step(tied, tmp_path / "s"), {"do": "forward", "tokens": TOKENS}]
    results = run_job({"model": str(tied), "steps": steps}, Layout(pipeline=2))
    check_same(tmp_path / "s", tied)
    holders = WeightSnapshot.open(tmp_path / "s").parts("model.embed_tokens.weight")
    assert [part.rank for part in holders] == [0, 1]
    assert gap(tied, results[0][1]) < CLEAN_GAP
