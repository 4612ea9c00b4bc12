"""The hook of miles and slime, in a job of the real megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerbisect.captures.store import Capture
from layerbisect.models import make_tiny
from scripts.megatron_engine import run_job

pytest.importorskip("megatron.core", reason="CI has megatron-core")

VOCAB = 256
TOKENS = [[int(t) for t in np.random.default_rng(n).integers(3, VOCAB, 9 + n)] for n in (0, 1)]
ROWS = 9 + 10
HOOKED = "tests.captures.megatron.live_steps:hooked"
ROUND = ["hook:", "forward"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        tmp_path_factory.mktemp("models") / "moe",
        "qwen3_moe",
        layers=2,
        hidden=32,
        heads=2,
        kv_heads=1,
        experts=4,
        top_k=2,
        vocab=VOCAB,
    )


@pytest.fixture(scope="module")
def lived(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one job lived through, by the names of its steps; ``folder`` holds the captures."""
    folder = tmp_path_factory.mktemp("captures")
    (folder / "file").write_text("no directory")

    def step(name: str, events: list[str], **more: Any) -> dict[str, Any]:
        env = {"LAYERBISECT_CAPTURE": str(folder / name)} | more.pop("env", {})
        args = {"vocab_size": VOCAB} | more.pop("args", {})
        found = {"do": HOOKED, "tokens": TOKENS, "micro_batch": 1, "events": events}
        return found | {"env": env, "args": args} | more

    steps = {
        "inert": step("inert", ["hook:ref_", *ROUND, "hook:"], env={"LAYERBISECT_CAPTURE": ""}),
        "job": step(
            "job", ["hook:ref_", "forward", *ROUND, "open", "train", "forward", "hook:", "forward"]
        ),
        "switched": step("switched", [*ROUND, "hook:ref_", "forward", "train"]),
        "second": step(
            "second",
            ["hook:", "forward", "train", "hook:ref_", "forward", *ROUND, "hook:", "forward"],
            env={
                "LAYERBISECT_ROUND": "1",
                "LAYERBISECT_POINTS": "layers.1",
                "LAYERBISECT_LABEL": "actor",
            },
        ),
        "unwritable": step(
            "unwritable",
            [*ROUND, *ROUND],
            env={"LAYERBISECT_CAPTURE": str(folder / "file" / "capture")},
        ),
        "wrong round": step("wrong-round", [*ROUND, *ROUND], env={"LAYERBISECT_ROUND": "first"}),
        "wrong points": step("wrong-points", ROUND, env={"LAYERBISECT_POINTS": "layers.7"}),
        "critic": step("critic", ROUND, **{"of the model": {"role": "critic"}}),
        "older": step("older", ROUND, args={"keep_old_actor": True}),
        "cut otherwise": step(
            "cut", ROUND, args={"allgather_cp": True, "context_parallel_size": 2}
        ),
        "changed": step("changed", [*ROUND, "grow:1", "forward", "train", "grow:-0.5"]),
        "no tail": step(
            "no-tail",
            [*ROUND, "train"],
            env={"LAYERBISECT_TAIL": str(folder / "nothing")},
        ),
        "replayed": step(
            "replayed",
            [*ROUND, "train"],
            env={"LAYERBISECT_TAIL": str(folder / "job")},
            args={"use_routing_replay": True},
        ),
        "rollout routes": step(
            "rollout-routes", [*ROUND, "train"], args={"use_rollout_routing_replay": True}
        ),
        "at exit": step("at-exit", [*ROUND, "exit"]),
    }
    (results,) = run_job({"model": str(model), "steps": list(steps.values())})
    return dict(zip(steps, results, strict=True)) | {"folder": folder}


def test_it_is_inert_without_a_directory(lived: dict[str, Any]) -> None:
    inert = lived["inert"]
    assert inert["told"] == [] and inert["undisturbed"]
    assert not (lived["folder"] / "inert").exists()


def test_the_job_computes_the_same_bits(lived: dict[str, Any]) -> None:
    (expected,) = lived["inert"]["scores"]
    for name, found in lived.items():
        if name not in ("folder", "changed"):
            assert found["undisturbed"], name
            assert all(scores == expected for scores in found["scores"]), name


def test_one_round_of_the_actor_is_captured(lived: dict[str, Any]) -> None:
    capture = Capture.open(lived["folder"] / "job")
    assert capture.finished and not capture.problems
    # neither the reference's round before it, nor what was computed after the job trained
    assert sorted(capture.rows.position) == sorted([*range(9), *range(10)])
    assert capture.label == "trainer" and "layers.1.output" in capture.points
    (expected,) = lived["inert"]["scores"]
    order = np.lexsort((capture.scores.rows.position, capture.scores.rows.sequence))
    np.testing.assert_allclose(capture.scores.logprob[order], np.concatenate(expected), atol=1e-5)


def test_it_is_whole_before_anybody_says_that_the_round_is_over(lived: dict[str, Any]) -> None:
    assert lived["job"]["opened"] == [[True, ROWS]]


def test_the_next_call_ends_the_round(lived: dict[str, Any]) -> None:
    capture = Capture.open(lived["folder"] / "switched")
    assert capture.finished and not capture.problems and len(capture.rows) == ROWS


def test_another_round_can_be_chosen(lived: dict[str, Any]) -> None:
    capture = Capture.open(lived["folder"] / "second")
    assert capture.finished and not capture.problems and len(capture.rows) == ROWS
    assert capture.label == "actor"
    assert "layers.1.attn.q" in capture.points and "layers.0.input" not in capture.points


@pytest.mark.parametrize(
    "name, told",
    [
        ("unwritable", "cannot make"),
        ("wrong round", "LAYERBISECT_ROUND is 'first'; give a number counted from 0"),
        ("wrong points", "no point matches 'layers.7' in a model of 2 layers"),
        ("older", "nothing is captured with --keep-old-actor"),
        ("cut otherwise", "nothing is captured with --allgather-cp"),
    ],
)
def test_what_goes_wrong_is_logged_once(lived: dict[str, Any], name: str, told: str) -> None:
    (message,) = lived[name]["told"]
    assert told in message and message.endswith("; the job goes on")
    assert len(lived[name]["scores"]) == (2 if name in ("unwritable", "wrong round") else 1)


def test_a_critic_is_not_captured(lived: dict[str, Any]) -> None:
    assert not (lived["folder"] / "critic").exists()
    assert lived["critic"]["told"] == []


def test_weights_that_change_meanwhile_are_said(lived: dict[str, Any]) -> None:
    assert lived["changed"]["undisturbed"]
    first, second = lived["changed"]["scores"]
    assert first != second
    capture = Capture.open(lived["folder"] / "changed")
    (problem,) = capture.problems
    assert "the weights changed during the capture (1 tensors, model.norm.weight first)" in problem
    assert any("the weights changed" in message for message in lived["changed"]["told"])


def test_a_tail_that_cannot_be_run_leaves_the_capture(lived: dict[str, Any]) -> None:
    for name, why in (
        ("no tail", "nothing holds no capture"),
        ("replayed", "not run with --use-routing-replay"),
    ):
        (failed,) = lived[name]["told"]
        assert why in failed
        folder = lived["folder"] / name.replace(" ", "-")
        assert Capture.open(folder).finished
        assert not folder.with_name(f"{folder.name}.carried.json").exists()


def test_routes_that_the_job_replays_are_told_from_the_model_s_own(lived: dict[str, Any]) -> None:
    assert Capture.open(lived["folder"] / "rollout-routes").info.routes == "forced"
    assert Capture.open(lived["folder"] / "job").info.routes == "own"


def test_the_end_of_the_process_ends_the_round(lived: dict[str, Any]) -> None:
    capture = Capture.open(lived["folder"] / "at-exit")
    assert capture.finished and not capture.problems
