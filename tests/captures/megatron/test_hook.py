"""The hook of miles and slime, in a job of the real megatron-core."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.megatron.hook import before_log_prob
from layerbisect.captures.store import Capture
from layerbisect.models import make_tiny
from scripts.megatron_engine import run_job
from tests.bisect.making import Line, write_lines

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
    (folder / "kept.carried.json").write_text("of another run")
    write_lines(folder / "others", [[Line("a", n, token) for n, token in enumerate([1, 2, 1])]])

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
        "taken": step("others", [*ROUND, "train"], env={"LAYERBISECT_TAIL": str(folder / "job")}),
        "kept": step("kept", [*ROUND, "train"], env={"LAYERBISECT_TAIL": str(folder / "job")}),
        "other prompts": step(
            "other-prompts", [*ROUND, "train"], env={"LAYERBISECT_ONLY": str(folder / "others")}
        ),
        "too many": step("too-many", ROUND, args={"vocab_size": VOCAB + 1}),
        "no number": step("no-number", ROUND, args={"vocab_size": str(VOCAB)}),
        "too few": step("too-few", [*ROUND, "train"], args={"vocab_size": 200}),
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
        ("too many", "vocab is 257, and the model's vocabulary has 256 rows; give the number"),
        ("no number", "vocab is '256', and the model's vocabulary has 256 rows; give the number"),
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


def test_nothing_is_overwritten_and_said_before_any_forward(lived: dict[str, Any]) -> None:
    # on a CPU the tail's forwards fail by themselves
    (taken,) = lived["taken"]["told"]
    assert "others already holds a capture; name another directory or delete it" in taken
    assert taken.endswith("; the job goes on")
    assert not (lived["folder"] / "others.carried.json").exists()
    (kept,) = lived["kept"]["told"]
    assert "kept.carried.json is there already, and is not overwritten" in kept
    assert (lived["folder"] / "kept.carried.json").read_text() == "of another run"
    assert Capture.open(lived["folder"] / "kept").finished


def test_a_rollout_of_other_prompts_is_told_from_a_model_that_was_not_called(
    lived: dict[str, Any],
) -> None:
    said = (
        f"2 sequences were seen and none is in {lived['folder'] / 'others'}: at position 0 the "
        f"first seen has token {TOKENS[0][0]}, and the first there 1"
    )
    (told,) = lived["other prompts"]["told"]
    assert said in told
    with pytest.raises(CaptureError, match=re.escape(said)):
        Capture.open(lived["folder"] / "other-prompts")


def test_a_token_beyond_the_vocabulary_that_was_given_is_not_scored(lived: dict[str, Any]) -> None:
    capture = Capture.open(lived["folder"] / "too-few")
    beyond = [(n, t) for ids in TOKENS for n, t in enumerate(ids) if t >= 200]
    assert beyond and len(capture.rows) == ROWS
    position, token = next((n, t) for n, t in enumerate(TOKENS[0]) if t >= 200)
    said = f"token {token} at position {position} lies beyond the vocabulary of 200 that was given"
    assert any(said in problem for problem in capture.problems)
    assert np.isfinite(capture.scores.logprob).all() and (capture.scores.rows.token < 200).all()
    assert len(capture.scores.logprob) == sum(t < 200 for ids in TOKENS for t in ids[1:])


@pytest.mark.parametrize(
    "model, told",
    [
        ([], "the model is an empty list; give the job's list of model chunks"),
        (None, "chunk 0 is a NoneType without a Megatron GPTModel"),
    ],
)
def test_no_model_is_told_in_a_sentence(
    model: Any,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("LAYERBISECT_CAPTURE", str(tmp_path / "c"))
    before_log_prob(SimpleNamespace(), model, "")
    (message,) = caplog.messages
    assert f"LayerBisectError: {told}" in message
    assert not (tmp_path / "c").exists()


def test_routes_that_the_job_replays_are_told_from_the_model_s_own(lived: dict[str, Any]) -> None:
    assert Capture.open(lived["folder"] / "rollout-routes").info.routes == "forced"
    assert Capture.open(lived["folder"] / "job").info.routes == "own"


def test_the_end_of_the_process_ends_the_round(lived: dict[str, Any]) -> None:
    capture = Capture.open(lived["folder"] / "at-exit")
    assert capture.finished and not capture.problems
