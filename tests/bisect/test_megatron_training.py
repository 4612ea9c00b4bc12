"""A frozen against a training forward of the real megatron-core, over one rank and over two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layerbisect.bisect.training_forward import compare_training
from layerbisect.bisect.training_report import TrainingVerdict
from layerbisect.captures.store import Capture
from layerbisect.models import make_tiny
from scripts.megatron_engine import run_job
from scripts.megatron_model import Layout

pytest.importorskip("megatron.core", reason="CI has megatron-core")
pytestmark = pytest.mark.slow

LAYERS, LENGTH, BATCHES = 4, 12, 2
FULL = {"recompute": "full"}
KINDS: dict[str, dict[str, Any]] = {
    "clean": {},
    "recomputed": FULL,
    "attention dropout": {"recompute": "selective", "attention_dropout": 0.1},
    "hidden dropout": {**FULL, "hidden_dropout": 0.1},
    "attention drawn anew": {
        "recompute": "selective",
        "attention_dropout": 0.1,
        "restore": False,
    },
    "drawn anew": {**FULL, "hidden_dropout": 0.1, "restore": False},
    "jitter": {**FULL, "config": {"moe_input_jitter_eps": 0.02}},
}


def judged(
    folder: Path, family: str, layout: Layout, kinds: dict[str, dict[str, Any]]
) -> dict[str, TrainingVerdict]:
    """Let one job do all kinds of training forwards, and compare each with its frozen forward."""
    sizes: dict[str, Any] = dict(
        layers=LAYERS, hidden=32, heads=4, kv_heads=2, head_dim=8, vocab=250, dtype="float32"
    )
    if family == "qwen3_moe":
        sizes |= dict(experts=4, top_k=2)
    model = make_tiny(folder / "model", family, **sizes)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(250, (BATCHES, 2, LENGTH), generator=generator).tolist()
    steps = [
        {
            "do": "tests.captures.megatron.training_steps:train",
            "tokens": tokens,
            "frozen": str(folder / f"frozen-{number}"),
            "training": str(folder / f"training-{number}"),
            **options,
        }
        for number, options in enumerate(kinds.values())
    ]
    job = {"model": str(model), "config": {"bf16": False}, "steps": steps}
    for rank in run_job(job, layout):
        for said in rank:
            assert said["equal"] and said["gradients"], "the capture changed gradients"
    return {
        kind: compare_training(step["frozen"], step["training"], recompute="recompute" in options)
        for (kind, options), step in zip(kinds.items(), steps, strict=True)
    }


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainingVerdict]:
    return judged(tmp_path_factory.mktemp("one"), "qwen3_moe", Layout(), KINDS)


def assert_repeats(verdict: TrainingVerdict) -> None:
    assert verdict.status == "agree" and verdict.first is None
    assert verdict.gap is not None and verdict.gap.max == 0
    assert verdict.coverage.rows.joined == BATCHES * 2 * LENGTH
    assert verdict.coverage.points.missing == ()


def assert_recomputed_alike(verdict: TrainingVerdict) -> None:
    assert verdict.recomputed.inner and verdict.recomputed.differing == ()
    assert verdict.recomputed.rows == BATCHES * 2 * LENGTH


def test_clean_forwards_repeat_each_other(verdicts: dict[str, TrainingVerdict]) -> None:
    assert_repeats(verdicts["clean"])
    assert not verdicts["clean"].recomputed.seen
    assert_repeats(verdicts["recomputed"])
    assert_recomputed_alike(verdicts["recomputed"])
    mode = verdicts["recomputed"].mode
    assert mode is not None and mode.training and mode.gradients
    assert mode.recompute == "recompute_granularity full" and not mode.dropout


def test_attention_dropout_and_what_selective_recomputation_repeats(
    verdicts: dict[str, TrainingVerdict],
) -> None:
    verdict = verdicts["attention dropout"]
    (cause,) = verdict.causes
    assert (verdict.status, cause.kind, cause.point) == (
        "divergent",
        "dropout",
        "layers.0.attn.context",
    )
    assert cause.modules == ("decoder.layers.0.self_attention.core_attention.attention_dropout",)
    assert_recomputed_alike(verdict)
    # of each layer queries, keys and values, which are kept, and what attention makes of them
    assert verdict.recomputed.points == 4 * LAYERS and verdict.recomputed.inner == LAYERS


def test_hidden_dropout_is_found_in_the_stream(verdicts: dict[str, TrainingVerdict]) -> None:
    verdict = verdicts["hidden dropout"]
    (cause,) = verdict.causes
    assert (cause.kind, cause.point) == ("dropout", "layers.0.mid")
    assert cause.modules == ("decoder.layers.0.self_attn_bda",)
    assert verdict.mode is not None and len(verdict.mode.dropout) == 2 * LAYERS
    assert_recomputed_alike(verdict)


def test_random_states_that_are_not_restored(verdicts: dict[str, TrainingVerdict]) -> None:
    causes = verdicts["drawn anew"].recomputed.causes
    assert [cause.point for cause in causes] == [f"layers.{n}.mid" for n in range(LAYERS)]
    assert all("not restored" in cause.sentence for cause in causes)
    causes = verdicts["attention drawn anew"].recomputed.causes
    assert causes[0].point == "layers.0.attn.context" and "not restored" in causes[0].sentence


def test_a_routers_jitter_is_named_by_its_setting(verdicts: dict[str, TrainingVerdict]) -> None:
    verdict = verdicts["jitter"]
    assert (verdict.causes[0].kind, verdict.causes[0].point) == (
        "routing",
        "layers.0.mlp.router_logits",
    )
    assert "moe_input_jitter_eps is 0.02" in verdict.causes[0].sentence
    # its generator is restored, too
    assert_recomputed_alike(verdict)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_moe", Layout(pipeline=2)), ("qwen3", Layout(tensor=2))],
    ids=["pp2", "dense-tp2"],
)
def test_ranks_that_run_their_backwards_in_another_order_are_joined(
    family: str, layout: Layout, tmp_path: Path
) -> None:
    verdict = judged(tmp_path, family, layout, {"recomputed": FULL})["recomputed"]
    assert_repeats(verdict)
    assert_recomputed_alike(verdict)
    again = Capture.open(tmp_path / "training-0", recomputed=True)
    assert {len(one.ranks) for one in again.passes} == {2}
