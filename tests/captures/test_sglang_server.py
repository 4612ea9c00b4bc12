"""Captures of the real SGLang server, on a CPU.

Each server takes half a minute to start, so one run of it serves many tests.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from layerbisect.captures.points import parse, select
from layerbisect.captures.store import Capture
from layerbisect.captures.transformers_capture import capture as capture_transformers
from tests.sglang_server import Answer, Server, ServerError, sglang_installed, sglang_server

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed"),
]

PROMPT = [int(t) for t in np.random.default_rng(0).integers(1, 512, 40)]
CHUNK = 16
ARGUMENTS = ("--chunked-prefill-size", str(CHUNK))


@dataclass(frozen=True)
class Served:
    """What a server answered to the same requests as every other."""

    generated: Answer
    other: Answer
    cached: Answer
    hot: Answer
    replayed: Answer

    @property
    def answers(self) -> list[Answer]:
        return [self.generated, self.other, self.cached, self.hot, self.replayed]


def ask(server: Server) -> Served:
    """Ask one thing after the other, so that passes hold the same rows on every server."""
    generated = server.generate(PROMPT, 6, rid="chosen-0")
    other = server.generate(PROMPT[:9], 3, rid="other-0")
    again = [*PROMPT, *generated.output[:3], 7, 8, 9]
    cached = server.generate(again, 3, rid="chosen-cached", logprob_start=len(again) - 1)
    hot = server.generate(PROMPT[:7], 4, rid="chosen-hot", temperature=2.0)
    replayed = server.replay(generated.tokens, rid="chosen-replay")
    return Served(generated, other, cached, hot, replayed)


@dataclass(frozen=True)
class Captured:
    """A capture, the answers that were given meanwhile, and where it lies."""

    served: Served
    directory: Path

    def open(self, requests: str = "*") -> Capture:
        return Capture.open(self.directory, requests=requests)


def settled(directory: Path) -> Capture:
    """Open a capture once its server is idle and has marked it as whole."""
    deadline = time.monotonic() + 20
    while True:
        capture = Capture.open(directory)
        if capture.finished or time.monotonic() > deadline:
            return capture
        time.sleep(0.1)


@pytest.fixture(scope="module")
def plain(
    small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Served, str, Path]:
    """Served by a server that may not capture: its directory holds something already."""
    directory = tmp_path_factory.mktemp("old")
    (directory / "notes.txt").write_text("mine")
    with sglang_server(small_moe_dir, capture=directory, arguments=ARGUMENTS) as server:
        return ask(server), server.log.read_text(), directory


@pytest.fixture(scope="module")
def captured(
    small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Captured, Server]]:
    """Served while all points of the chosen requests were captured; the server still runs."""
    directory = tmp_path_factory.mktemp("captures") / "rollout"
    with sglang_server(
        small_moe_dir,
        capture=directory,
        points="all",
        requests="chosen-*",
        label="engine",
        arguments=ARGUMENTS,
    ) as server:
        served = ask(server)
        assert settled(directory).finished
        yield Captured(served, directory), server


@pytest.fixture(scope="module")
def captured_on_two(small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """The same with two tensor-parallel processes."""
    directory = tmp_path_factory.mktemp("captures") / "two"
    with sglang_server(
        small_moe_dir,
        capture=directory,
        points="all",
        requests="chosen-*",
        tp=2,
        arguments=ARGUMENTS,
    ) as server:
        served = ask(server)
        assert settled(directory).finished
    return Captured(served, directory)


def by_transformers(model: Path, sequences: list[list[int]], directory: Path) -> Capture:
    """Capture transformers' forward over whole sequences."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with capture_transformers(loaded, directory, points="all"), torch.no_grad():
        for tokens in sequences:
            loaded(input_ids=torch.tensor([tokens]))
    return Capture.open(directory)


def joined(left: Capture, right: Capture) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows of two captures that have seen the same prefix; every row of ``left`` must have one."""
    places = {key.tobytes(): place for place, key in enumerate(right.keys.key)}
    assert left.keys.known.all()
    return np.arange(len(left.rows)), np.array([places[key.tobytes()] for key in left.keys.key])


def relative_error(a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.floating]:
    """Error of each row against its size."""
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    return np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)


def assert_agrees(engine: Capture, trainer: Capture, layers: int, moe: bool) -> None:
    """Every point of the engine is what transformers computes, but for roundings and ties."""
    mine, theirs = joined(engine, trainer)
    points = [p for p in select("all", layers, moe) if p != "logprob"]
    assert set(points) <= set(engine.points)
    for point in points:
        a, b = engine.read(point, mine), trainer.read(point, theirs)
        assert a.shape == b.shape, point
        if point.endswith("expert_ids"):
            same = [set(x) == set(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
            assert np.mean(same) > 0.8, point
        else:
            # a flipped expert changes a few rows wholly, rounding changes all of them a little
            assert np.median(relative_error(a, b)) < 0.03, point
            assert np.isfinite(a).all(), point


def assert_adds_up(capture: Capture, layers: int) -> None:
    """The residual stream is, bit for bit, the sum of what the branches added."""

    def rounded(x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
        return (torch.from_numpy(x) + torch.from_numpy(y)).bfloat16().float().numpy()

    np.testing.assert_array_equal(capture.read("layers.0.input"), capture.read("embed"))
    for layer in range(layers):
        name = f"layers.{layer}."
        after = f"layers.{layer + 1}.input" if layer < layers - 1 else name + "output"
        mid = capture.read(name + "mid")
        np.testing.assert_array_equal(
            mid, rounded(capture.read(name + "input"), capture.read(name + "attn.out"))
        )
        np.testing.assert_array_equal(
            capture.read(after), rounded(mid, capture.read(name + "mlp.out"))
        )


def test_an_old_directory_is_refused_and_left_alone(plain: tuple[Served, str, Path]) -> None:
    _, log, directory = plain
    assert "is not an empty directory" in log
    assert [p.name for p in directory.iterdir()] == ["notes.txt"]


def test_answers_are_the_same_bit_for_bit_while_capturing(
    plain: tuple[Served, str, Path], captured: tuple[Captured, Server]
) -> None:
    assert captured[0].served.answers == plain[0].answers


def test_a_prefix_of_the_second_prompt_came_from_the_cache(
    captured: tuple[Captured, Server],
) -> None:
    served = captured[0].served
    assert served.cached.cached >= len(PROMPT)
    assert served.generated.cached == 0
    assert served.replayed.cached == 0


def test_only_chosen_requests_are_captured(captured: tuple[Captured, Server]) -> None:
    capture = captured[0].open()
    names = [s.name for s in capture.sequences]
    assert names == ["chosen-0", "chosen-cached", "chosen-hot", "chosen-replay"]
    assert capture.problems == ()
    assert capture.label == "engine"


def test_rows_are_prefill_in_chunks_then_decode(captured: tuple[Captured, Server]) -> None:
    capture = captured[0].open("chosen-0")
    assert capture.rows.token.tolist() == captured[0].served.generated.tokens[:-1]
    assert capture.rows.position.tolist() == list(range(len(PROMPT) + 5))
    phases = capture.phases.tolist()
    assert phases == ["prefill"] * len(PROMPT) + ["decode"] * 5


def test_rows_after_a_cached_prefix_have_keys(captured: tuple[Captured, Server]) -> None:
    capture = captured[0].open("chosen-cached")
    served = captured[0].served.cached
    assert capture.keys.known.all()
    assert capture.rows.position[0] == served.cached
    assert capture.rows.token.tolist() == served.tokens[served.cached : -1]


def test_decode_rows_have_the_keys_of_the_replay(captured: tuple[Captured, Server]) -> None:
    decoded, replay = captured[0].open("chosen-0"), captured[0].open("chosen-replay")
    mine, theirs = joined(decoded, replay)
    a = decoded.read("layers.3.output", mine)
    b = replay.read("layers.3.output", theirs)
    assert np.median(relative_error(a, b)) < 0.03


def test_scores_are_the_log_probs_that_the_server_answered(
    captured: tuple[Captured, Server],
) -> None:
    served = captured[0].served
    for answer, name in ((served.generated, "chosen-0"), (served.replayed, "chosen-replay")):
        scores = captured[0].open(name).scores
        order = np.argsort(scores.rows.position)
        given = [*answer.prompt_logprobs[1:], *answer.output_logprobs]
        assert scores.rows.position[order].tolist() == list(range(1, len(answer.tokens)))
        assert scores.rows.token[order].tolist() == answer.tokens[1:]
        assert scores.logprob[order].tolist() == given
        assert scores.keys.known.all()


def test_scores_at_another_temperature_are_raw(captured: tuple[Captured, Server]) -> None:
    # the server answers log-probs of softmax(logits / 2), which are no scores of the model
    hot = captured[0].served.hot
    scores = captured[0].open("chosen-hot").scores
    drawn = scores.rows.position >= len(hot.prompt)
    assert scores.rows.token[drawn].tolist() == list(hot.output)
    assert not np.allclose(scores.logprob[drawn], hot.output_logprobs, atol=0.05)


def test_every_point_is_what_transformers_computes(
    captured: tuple[Captured, Server], small_moe_dir: Path, tmp_path: Path
) -> None:
    sequences = [a.tokens for a in captured[0].served.answers]
    trainer = by_transformers(small_moe_dir, sequences, tmp_path / "trainer")
    engine = captured[0].open()
    assert_agrees(engine, trainer, 4, moe=True)
    assert_adds_up(engine, 4)
    assert {seen.how for seen in engine.points.values()} == {"observed"}


def test_weights_are_those_of_the_checkpoint(
    captured: tuple[Captured, Server], small_moe_dir: Path, tmp_path: Path
) -> None:
    trainer = by_transformers(small_moe_dir, [PROMPT], tmp_path / "trainer")
    engine = captured[0].open()
    assert dict(engine.info.fingerprints) == dict(trainer.info.fingerprints)


def test_two_processes_hold_shards_and_partial_sums(
    captured_on_two: Captured, small_moe_dir: Path, tmp_path: Path
) -> None:
    engine = captured_on_two.open()
    sequences = [a.tokens for a in captured_on_two.served.answers]
    trainer = by_transformers(small_moe_dir, sequences, tmp_path / "trainer")
    assert engine.problems == ()
    assert engine.info.parallel["tp"] == 2
    assert engine.points["layers.1.attn.out"].how == "partial_sum"
    assert_agrees(engine, trainer, 4, moe=True)
    assert_adds_up(engine, 4)
    assert engine.replica_findings == {}


def test_a_killed_server_leaves_its_finished_passes(captured: tuple[Captured, Server]) -> None:
    """The last test of this server: it ends it."""
    done, server = captured
    before = len(done.open().rows)

    def generate() -> None:
        try:
            server.generate(PROMPT, 500, rid="chosen-killed")
        except ServerError:
            pass

    asking = threading.Thread(target=generate)
    asking.start()
    deadline = time.monotonic() + 60
    while len(list(done.directory.glob("rank-0/pass-*"))) < 40 and time.monotonic() < deadline:
        time.sleep(0.05)
    server.kill()
    asking.join()
    capture = done.open()
    assert not capture.finished
    assert any("not finished" in problem for problem in capture.problems)
    assert len(capture.rows) > before
    killed = done.open("chosen-killed")
    assert killed.keys.known.all()
    for point in ("layers.0.input", "layers.3.attn.q", "layers.3.mlp.expert_ids"):
        assert len(killed.read(point)) == len(killed.rows)
        assert killed.read(point).ndim == len(parse(point).dims)
