"""Captures of the real megatron-core, in float32, against captures of the same model elsewhere.

In float32 two engines agree so closely that a wrong head, row, expert or half of a layer shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import layerbisect
from layerbisect.bisect.join import join
from layerbisect.captures.points import parse
from layerbisect.captures.store import Capture
from layerbisect.loading import load_model
from layerbisect.models import make_tiny
from scripts.megatron_engine import run_job
from scripts.megatron_model import Layout

pytest.importorskip("megatron.core", reason="CI has megatron-core")

VOCAB = 250
LAYERS = 4
# over four layers' sums in float32, in another order
CLOSE = 2e-4


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (24, 17, 24, 9)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = dict(
        layers=LAYERS, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=VOCAB, dtype="float32"
    )
    return {
        "qwen3_moe": make_tiny(
            folder / "moe", "qwen3_moe", experts=8, top_k=2, intermediate=32, **sizes
        ),
        "qwen3": make_tiny(folder / "dense", "qwen3", **sizes),
    }


@pytest.fixture(scope="module")
def expected(
    models: dict[str, Path], tokens: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Capture]:
    found = {}
    for family, model in models.items():
        directory = tmp_path_factory.mktemp("expected") / family
        engine: Any = load_model(model, dtype="float32", attention="eager")
        patterns = ["all", "logits"]
        with layerbisect.capture(engine, directory, points=patterns, label="rollout"):
            for ids in tokens:
                with torch.no_grad():
                    engine(input_ids=torch.tensor([ids]), use_cache=False)
        found[family] = Capture.open(directory)
    return found


def is_whole(capture: Capture) -> bool:
    """Nothing is missing; the vocabulary of 250 is padded to 256, and the padding has logits."""
    return capture.finished and all("pad the vocabulary" in text for text in capture.problems)


def assert_same(megatron: Capture, expected: Capture, without: tuple[str, ...] = ()) -> None:
    """Every point is there in every row that both have, and nearly equal."""
    joined = join(expected, megatron)
    wanted = [name for name in expected.info.points if parse(name).suffix not in without]
    assert len(joined) == len(np.unique(expected.keys.key))
    for point in wanted:
        if point == "logprob":
            np.testing.assert_allclose(joined.score_trainer, joined.score_rollout, atol=CLOSE)
            assert len(joined.score_trainer) >= len(joined) - len(expected.sequences)
            continue
        mine = megatron.read(point, joined.trainer)
        theirs = expected.read(point, joined.rollout)
        if point.endswith("expert_ids"):
            np.testing.assert_array_equal(np.sort(mine, 1), np.sort(theirs, 1))
        elif point.endswith("expert_weights"):
            ids = point.replace("expert_weights", "expert_ids")
            order = np.argsort(expected.read(ids, joined.rollout), 1)
            theirs = np.take_along_axis(theirs, order, 1)
            np.testing.assert_allclose(mine, theirs, atol=CLOSE)
        else:
            scale = np.abs(theirs).max()
            np.testing.assert_allclose(mine / scale, theirs / scale, atol=CLOSE, err_msg=point)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "micro_batch"),
    [
        ("qwen3_moe", Layout(), 4),
        ("qwen3_moe", Layout(tensor=2), 2),
        ("qwen3_moe", Layout(pipeline=2, virtual=2), 1),
        ("qwen3_moe", Layout(pipeline=2, expert=2), 2),
        ("qwen3", Layout(tensor=2), 4),
    ],
    ids=["one", "tp2", "pp2-virtual", "pp2-ep2", "dense-tp2"],
)
def test_every_point_in_every_layout_is_that_of_the_same_model_elsewhere(
    family: str,
    layout: Layout,
    micro_batch: int,
    models: dict[str, Path],
    expected: dict[str, Capture],
    tokens: list[list[int]],
    tmp_path: Path,
) -> None:
    step = {"do": "forward", "tokens": tokens, "micro_batch": micro_batch}
    recorded = step | {
        "capture": str(tmp_path / "c"),
        "points": ["all", "logits"],
        "vocab": VOCAB,
    }
    job = {"model": str(models[family]), "config": {"bf16": False}, "steps": [step, recorded, step]}
    before, during, after = run_job(job, layout)[0]
    assert before == during == after
    capture = Capture.open(tmp_path / "c")
    assert is_whole(capture)
    assert capture.info.parallel["tp"] == layout.tensor
    assert_same(capture, expected[family])
    assert capture.replica_findings == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "hidden"),
    [("qwen3_moe", ("attn.norm", "logits")), ("qwen3", ("attn.norm", "mlp.norm", "logits"))],
)
def test_a_norm_fused_into_the_layer_after_it_is_not_observable_and_nothing_stands_for_it(
    family: str,
    hidden: tuple[str, ...],
    models: dict[str, Path],
    expected: dict[str, Capture],
    tokens: list[list[int]],
    tmp_path: Path,
) -> None:
    step = {"do": "tests.megatron_steps:fused_norms", "capture": str(tmp_path / "c")}
    run_job({"model": str(models[family]), "steps": [step | {"tokens": tokens}]}, Layout())
    capture = Capture.open(tmp_path / "c")
    assert is_whole(capture)
    assert_same(capture, expected[family], without=hidden)
    for suffix in set(hidden) - {"logits"}:
        seen = capture.points[f"layers.0.{suffix}"]
        assert seen.how == "not_observable" and "fused" in seen.reason
        assert not capture.has(f"layers.0.{suffix}").any()


@pytest.mark.slow
def test_what_is_computed_again_for_the_backward_is_captured_once(
    models: dict[str, Path], expected: dict[str, Capture], tokens: list[list[int]], tmp_path: Path
) -> None:
    equal = [ids for ids in tokens if len(ids) == 24]
    step = {
        "do": "tests.megatron_steps:train_with_recomputation",
        "tokens": equal,
        "capture": str(tmp_path / "c"),
        "vocab": VOCAB,
    }
    job = {"model": str(models["qwen3_moe"]), "config": {"bf16": False}, "steps": [step]}
    ((said,),) = run_job(job, Layout())
    assert said == {"calls of the first layer": 2}
    capture = Capture.open(tmp_path / "c")
    assert is_whole(capture) and len(capture.passes) == 1
    assert len(capture.rows) == sum(map(len, equal))
    joined = join(expected["qwen3_moe"], capture)
    for point in ("layers.1.attn.out", "layers.2.mlp.out", "final_norm"):
        mine = capture.read(point, joined.trainer)
        theirs = expected["qwen3_moe"].read(point, joined.rollout)
        np.testing.assert_allclose(mine, theirs, atol=CLOSE * np.abs(theirs).max())


@pytest.mark.slow
def test_of_a_jobs_batches_only_what_another_capture_holds_is_recorded(
    models: dict[str, Path], expected: dict[str, Capture], tokens: list[list[int]], tmp_path: Path
) -> None:
    few = {"do": "forward", "tokens": tokens[1:2], "points": "coarse", "vocab": VOCAB}
    many = few | {"tokens": [tokens[0], tokens[2], *tokens], "micro_batch": 2}
    first, second = tmp_path / "few", tmp_path / "only"
    steps = [few | {"capture": str(first)}, many | {"capture": str(second), "only": str(first)}]
    run_job({"model": str(models["qwen3_moe"]), "steps": steps}, Layout(pipeline=2))
    one, other = Capture.open(first), Capture.open(second)
    assert is_whole(other) and [s.name for s in other.sequences] == ["s3"]
    joined = join(one, other)
    assert len(joined) == len(tokens[1])
