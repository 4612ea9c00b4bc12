"""A job's actor on the real megatron-core scores and steps as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.captured import score_from_capture
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.weights.format import Part, SnapshotInfo
from layerbisect.captures.weights.names import logical_parts
from layerbisect.captures.weights.snapshot import write_rank
from layerbisect.captures.weights.store import WeightSnapshot
from layerbisect.loading import load_model
from layerbisect.models import make_tiny
from scripts.megatron_actor import STOP, Actor
from scripts.megatron_engine import Rank, run_job
from scripts.megatron_model import Layout
from scripts.reproduce_megatron import export

# megatron pads to a multiple of 128, and what its cross-entropy gives padding has no counterpart
VOCAB, HIDDEN = 256, 64
LEARNING_RATE = 1e-3
REWARDS = [-1.0, 1.0, 1.0, -1.0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        tmp_path_factory.mktemp("models") / "t0", layers=2, hidden=HIDDEN, heads=4, kv_heads=2,
        head_dim=16, experts=4, top_k=2, intermediate=32, vocab=VOCAB, dtype="float32",
    )  # fmt: skip


@pytest.fixture(scope="module")
def record() -> ScoreRecord:
    """Two samples of each prompt, of different lengths."""
    random, calls = np.random.default_rng(0), []
    for prompt in range(2):
        asked = random.integers(0, VOCAB, 5 + 4 * prompt)
        for sample in range(2):
            answer = random.integers(0, VOCAB, 9 + 3 * sample)
            scores = {"A": np.full(len(answer), -1.0)}
            calls.append(Call.of(f"p{prompt}.s{sample}", asked, answer, scores))
    return ScoreRecord(RecordInfo(columns={"A": Scoring()}), calls)


def scored(model: Any, call: Call) -> torch.Tensor:
    """Log-probs of a response, from transformers."""
    logits = model(input_ids=torch.from_numpy(call.tokens)[None]).logits[0]
    chosen = torch.from_numpy(call.response)[:, None]
    scores: torch.Tensor = logits[len(call.prompt) - 1 : -1].log_softmax(-1)
    return scores.gather(-1, chosen)[:, 0]


@pytest.fixture(scope="module")
def expected(model: Path, record: ScoreRecord) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """transformers' log-probs before the step, and its weights after it."""
    engine: Any = load_model(model, dtype="float32", attention="eager")
    optimizer = torch.optim.AdamW(engine.parameters(), lr=LEARNING_RATE)
    scores = [scored(engine, call) for call in record]
    for reward, score in zip(REWARDS, scores, strict=True):
        torch.autograd.backward(-reward * score.mean() / len(record))
    optimizer.step()
    weights = {
        part.name: part.values
        for name, parameter in engine.named_parameters()
        for part in logical_parts(Part.of(name, parameter.detach(), {}), HIDDEN)
    }
    return [s.detach().numpy() for s in scores], weights


@pytest.mark.parametrize("layout", [Layout(), Layout(pipeline=2, expert=2)], ids=["one", "pp2-ep2"])
def test_a_step_is_transformers_step_and_c_is_its_score(
    layout: Layout,
    model: Path,
    record: ScoreRecord,
    expected: tuple[list[Any], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    pytest.importorskip("megatron.core", reason="CI has megatron-core")
    calls = [(call.tokens.tolist(), len(call.prompt)) for call in record]
    captures = [tmp_path / "before", tmp_path / "again"]
    score, step = {"do": "score", "calls": calls, "repeats": 2}, {"do": "update", "calls": calls}
    told: list[dict[str, Any]] = [
        score | {"capture": str(captures[0]), "offset": 0.0},
        {"do": "watch", "calls": calls, "offset": 0.25},
        step | {"rewards": REWARDS},
        {"do": "save", "directory": str(tmp_path / "weights"), "version": "T1"},
        {"do": "load", "checkpoint": str(model)},
        score | {"capture": str(captures[1]), "offset": 0.25},
        {"do": STOP},
    ]
    for number, command in enumerate(told):
        (tmp_path / f"{number}.json").write_text(json.dumps(command))
    serve = {"do": "scripts.megatron_actor:serve", "folder": str(tmp_path)}
    steps = [serve | {"learning_rate": LEARNING_RATE}]
    run_job({"model": str(model), "config": {"bf16": False}, "steps": steps}, layout)

    def answers(number: int) -> list[Any]:
        files = [tmp_path / f"{number}.{rank}.json" for rank in range(layout.ranks)]
        return [json.loads(file.read_text()) for file in files]

    scores, weights = expected
    # whichever replica scored a call, and wherever its capture lists it
    found, again = (score_from_capture(record, capture) for capture in captures)
    assert found.columns == again.columns == ("A", "C0", "C1")
    returned = {int(n): value for answer in answers(0) for n, value in answer.items()}
    lowered = {int(n): value for answer in answers(5) for n, value in answer.items()}
    for number, (call, other, wanted) in enumerate(zip(found, again, scores, strict=True)):
        np.testing.assert_allclose(call.scores["C0"], wanted, atol=1e-4)
        for column in (call.scores["C1"], other.scores["C0"], other.scores["C1"]):
            np.testing.assert_array_equal(column, call.scores["C0"])
        np.testing.assert_allclose(returned[number][0], call.scores["C0"], atol=1e-5)
        np.testing.assert_allclose(lowered[number][1], call.scores["C0"] - 0.25, atol=1e-5)
    changes = [change for answer in answers(1) for change in answer]
    assert len(changes) == len(record)
    assert all("every value lowered by 0.25" in change for change in changes)

    snapshot = WeightSnapshot.open(tmp_path / "weights")
    assert set(snapshot.names()) == set(weights) and not snapshot.problems
    off = total = 0
    for name, wanted in weights.items():
        whole = snapshot.tensor(name)
        assert not whole.disagreements
        off += int((whole.values - wanted).abs().gt(LEARNING_RATE / 10).sum())
        total += wanted.numel()
    # a step of Adam is +-LEARNING_RATE, and its sign is chance where the gradient is rounding
    assert off < total / 1000


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2, virtual=2)])
def test_a_layout_that_cannot_be_trained_is_refused(layout: Layout) -> None:
    with pytest.raises(ValueError, match="cannot train"):
        Actor(Rank([], layout, Path()), LEARNING_RATE)


def test_a_snapshot_with_a_rank_missing_makes_no_checkpoint(tmp_path: Path) -> None:
    info = SnapshotInfo("megatron-core", "0", "trainer", "float32", 2, True)
    write_rank(tmp_path / "weights", info, 0, [Part.of("a", torch.zeros(2), {})])
    with pytest.raises(ValueError, match="rank 1 of 2 wrote nothing"):
        export(tmp_path / "weights", tmp_path, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
