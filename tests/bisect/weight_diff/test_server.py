"""Weights inside the real SGLang server, on a CPU: mapped, updated from disk, stale and broken.

Each server takes half a minute to start, so one serves a class of tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from layerbisect.bisect.weight_diff.compare import compare
from layerbisect.captures.weights.store import WeightSnapshot
from layerbisect.models import make_tiny
from tests.sglang_server import Server, sglang_installed, sglang_server

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed"),
]

# 500 tokens are padded to 512
SHAPE = dict(layers=2, hidden=128, heads=4, kv_heads=2, experts=8, top_k=2, vocab=500)
NORM = "model.layers.1.self_attn.k_norm.weight"


@dataclass(frozen=True)
class Running:
    """A server, what it was started with, and other weights of the same shape."""

    server: Server
    weights: Path
    old: Path
    new: Path

    def snapshot(self) -> Path:
        """Have the server write its weights if they changed, and return the newest."""
        answer = self.server.post("/weights_checker", {"action": "checksum"})
        assert answer["success"], answer
        return max(self.weights.iterdir())

    def update(self, model: Path, version: str) -> None:
        """Load other weights while the server runs."""
        asked = {"model_path": str(model), "weight_version": version}
        answer = self.server.post("/update_weights_from_disk", asked)
        assert answer["success"], answer


def tie(model: Path) -> Path:
    """Take the head out of a checkpoint, and tie it to the embedding."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def run(folder: Path, models: list[Path], tp: int) -> Iterator[Running]:
    weights = folder / "weights"
    environment = {"LAYERBISECT_WEIGHTS": str(weights)}
    with sglang_server(models[0], tp=tp, environment=environment) as server:
        yield Running(server, weights, *models)


@pytest.fixture(scope="class")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two processes that share a Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("moe")
    models = [make_tiny(folder / f"m{seed}", seed=seed, **SHAPE) for seed in (0, 1)]  # type: ignore[arg-type]
    yield from run(folder, models, tp=2)


@pytest.fixture(scope="class")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One process with a dense Qwen3 whose head is tied to the embedding."""
    folder = tmp_path_factory.mktemp("dense")
    models = [
        tie(make_tiny(folder / f"m{seed}", "qwen3", seed=seed, **SHAPE))  # type: ignore[arg-type]
        for seed in (0, 1)
    ]
    yield from run(folder, models, tp=1)


def tensors(model: Path) -> int:
    return len(load_file(model / "model.safetensors"))


def updated_agrees(running: Running, ranks: int) -> None:
    """Follow a server through an update, at each step against both checkpoints."""
    before = running.snapshot()
    report = compare(before, running.old)
    assert report and report.coverage.same == tensors(running.old), report.groups
    assert not any(report.coverage.only.values()) and not report.coverage.not_compared
    snapshot = WeightSnapshot.open(before)
    # asking again changes nothing
    assert running.snapshot() == before and len(list(running.weights.iterdir())) == 1
    assert set(snapshot.ranks) == set(range(ranks)) and snapshot.problems == ()
    assert snapshot.info.engine == "sglang" and snapshot.info.parallel["tp"] == ranks

    # the trainer has taken a step that the server has not seen
    stale = compare(before, running.new, previous=running.old)
    assert {(f.kind, f.side) for f in stale.findings} == {("stale", "rollout")}
    assert len(stale.findings) == tensors(running.old)

    running.update(running.new, "step-1")
    after = running.snapshot()
    assert compare(after, running.new).coverage.same == tensors(running.new)
    assert not compare(after, running.old)
    assert WeightSnapshot.open(after).info.weight_version == "step-1"
    assert running.snapshot() == after != before
    # what was written before stays as it was
    assert compare(before, running.old)


class TestTwoProcesses:
    def test_through_an_update(self, moe: Running) -> None:
        updated_agrees(moe, 2)

    def test_shards_and_copies_are_what_they_say(self, moe: Running) -> None:
        snapshot = WeightSnapshot.open(moe.snapshot())
        stem = "model.layers.0."
        cut = {
            f"{stem}self_attn.q_proj.weight": (0, [(0, 64), (64, 128)]),
            f"{stem}self_attn.k_proj.weight": (0, [(0, 32), (32, 64)]),
            f"{stem}self_attn.o_proj.weight": (1, [(0, 64), (64, 128)]),
            f"{stem}mlp.experts.7.up_proj.weight": (0, [(0, 32), (32, 64)]),
            f"{stem}mlp.experts.7.down_proj.weight": (1, [(0, 32), (32, 64)]),
            f"{stem}mlp.gate.weight": (0, [(0, 8), (0, 8)]),
            "lm_head.weight": (0, [(0, 256), (256, 500)]),
        }
        for name, (dim, expected) in cut.items():
            held = [part.header.extents[dim][:2] for part in snapshot.parts(name)]
            assert held == expected, name

    def test_a_conversion_that_swaps_and_forgets_is_named(
        self, moe: Running, tmp_path: Path
    ) -> None:
        broken = tmp_path / "broken"
        broken.mkdir()
        (broken / "config.json").write_text((moe.new / "config.json").read_text())
        held = load_file(moe.new / "model.safetensors")
        for expert in range(8):
            names = [f"model.layers.0.mlp.experts.{expert}.{k}_proj.weight" for k in ("gate", "up")]
            held[names[0]], held[names[1]] = held[names[1]], held[names[0]]
        held[NORM] = torch.full_like(held[NORM], 1e4)
        save_file(held, broken / "model.safetensors", metadata={"format": "pt"})
        moe.update(broken, "broken")
        groups = compare(moe.snapshot(), moe.new, previous=moe.new).groups
        assert [(g.kind, g.side, len(g.names)) for g in groups] == [
            ("not loaded", "rollout", 1),
            ("swapped", "rollout", 16),
        ]
        assert groups[1].how == "gate_proj and up_proj exchanged"

    def test_the_server_goes_on_serving(self, moe: Running) -> None:
        moe.update(moe.new, "again")
        first = moe.server.generate([5, 6, 7], 4, temperature=0.0)
        moe.snapshot()
        second = moe.server.generate([5, 6, 7], 4, temperature=0.0)
        assert first.output == second.output


class TestTiedDenseModel:
    def test_through_an_update(self, dense: Running) -> None:
        updated_agrees(dense, 1)

    def test_other_actions_write_nothing(self, dense: Running) -> None:
        before = sorted(dense.weights.iterdir())
        dense.server.post("/weights_checker", {"action": "snapshot"})
        assert sorted(dense.weights.iterdir()) == before
