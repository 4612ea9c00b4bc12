"""Captures of the real SGLang server, on a CPU.

Each server takes half a minute to start, so one serves a class of tests, and ends with it: two at
once would be too many for a small machine.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from layerbisect.captures.capture import capture as capture_transformers
from layerbisect.captures.points import parse, select
from layerbisect.captures.store import Capture
from tests.sglang_server import Answer, Server, ServerError, sglang_installed, sglang_server

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed"),
]

PROMPT = [int(t) for t in np.random.default_rng(0).integers(1, 512, 40)]
# prompts are prefilled in chunks of 16 tokens
CHUNKED = ("--chunked-prefill-size", "16")
LAYERS = 4


@dataclass(frozen=True)
class Served:
    """What a server answered."""

    generated: Answer
    cached: Answer
    replayed: Answer

    @property
    def answers(self) -> list[Answer]:
        """The answers, without the IDs that were given to the requests."""
        return [replace(a, rid="") for a in (self.generated, self.cached, self.replayed)]


def ask(server: Server, prefix: str) -> Served:
    """Ask one thing after the other from an empty cache, so that passes hold the same rows."""
    server.flush()
    generated = server.generate(PROMPT, 6, rid=f"{prefix}-generated", temperature=0.0)
    again = [*PROMPT, *generated.output[:3], 7, 8, 9]
    cached = server.generate(
        again, 3, rid=f"{prefix}-cached", logprob_start=len(again) - 1, temperature=0.0
    )
    return Served(generated, cached, server.replay(generated.tokens, rid=f"{prefix}-replayed"))


@dataclass(frozen=True)
class Running:
    """A server that captures all points, and what it answered so far."""

    server: Server
    directory: Path
    served: Served
    before: Served | None = None

    def open(self, requests: str = "*") -> Capture:
        """Open what was captured."""
        return self.server.captured(requests)


@pytest.fixture(scope="class")
def one(small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One process; it served others before the first chosen request came."""
    directory = tmp_path_factory.mktemp("captures") / "one"
    with sglang_server(
        small_moe_dir,
        capture=directory,
        points="all",
        requests="chosen-*",
        label="engine",
        fault="",
        arguments=CHUNKED,
    ) as server:
        before = ask(server, "other")
        served = ask(server, "chosen")
        yield Running(server, directory, served, before)


@pytest.fixture(scope="class")
def two(small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two tensor-parallel processes, which capture every request but SGLang's own."""
    directory = tmp_path_factory.mktemp("captures") / "two"
    with sglang_server(
        small_moe_dir, capture=directory, points="all", tp=2, fault="", arguments=CHUNKED
    ) as server:
        yield Running(server, directory, ask(server, "a"))


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
    error: NDArray[np.floating] = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    return error


def differs(left: Capture, right: Capture, point: str) -> bool:
    """Say whether a point has other values in ``left`` than in ``right``, beyond noise."""
    mine, theirs = joined(left, right)
    error = relative_error(left.read(point, mine), right.read(point, theirs))
    return bool(np.median(error) > 0.03)


def assert_agrees(engine: Capture, trainer: Capture, points: list[str]) -> None:
    """Every point of the engine is what transformers computes, but for roundings and ties."""
    mine, theirs = joined(engine, trainer)
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


def given(answer: Answer) -> NDArray[np.float64]:
    """The log-probs that the server answered, from the second token on."""
    return np.array([*answer.prompt_logprobs[1:], *answer.output_logprobs], np.float64)


def every_point(moe: bool) -> list[str]:
    return [p for p in select("all", LAYERS, moe) if p != "logprob"]


def assert_adds_up(capture: Capture) -> None:
    """The residual stream is, bit for bit, the sum of what the branches added."""

    def rounded(x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
        total: NDArray[np.float32] = (
            (torch.from_numpy(x) + torch.from_numpy(y)).bfloat16().float().numpy()
        )
        return total

    np.testing.assert_array_equal(capture.read("layers.0.input"), capture.read("embed"))
    for layer in range(LAYERS):
        name = f"layers.{layer}."
        after = f"layers.{layer + 1}.input" if layer < LAYERS - 1 else name + "output"
        mid = capture.read(name + "mid")
        np.testing.assert_array_equal(
            mid, rounded(capture.read(name + "input"), capture.read(name + "attn.out"))
        )
        np.testing.assert_array_equal(
            capture.read(after), rounded(mid, capture.read(name + "mlp.out"))
        )


class TestOneProcess:
    def test_answers_are_the_same_bit_for_bit_while_capturing(self, one: Running) -> None:
        assert one.before is not None
        assert one.served.answers == one.before.answers

    def test_only_chosen_requests_are_captured(self, one: Running) -> None:
        capture = one.open()
        names = [s.name for s in capture.sequences]
        assert names == ["chosen-generated", "chosen-cached", "chosen-replayed"]
        assert capture.problems == ()
        assert capture.label == "engine"

    def test_rows_are_prefill_in_chunks_then_decode(self, one: Running) -> None:
        capture = one.open("chosen-generated")
        assert capture.rows.token.tolist() == one.served.generated.tokens[:-1]
        assert capture.rows.position.tolist() == list(range(len(PROMPT) + 5))
        assert capture.phases.tolist() == ["prefill"] * len(PROMPT) + ["decode"] * 5
        lengths = [len(p.rows) for p in capture.passes]
        assert lengths == [16, 16, 8, 1, 1, 1, 1, 1]

    def test_rows_after_a_cached_prefix_have_keys(self, one: Running) -> None:
        capture = one.open("chosen-cached")
        served = one.served.cached
        assert served.cached >= len(PROMPT)
        assert capture.keys.known.all()
        assert capture.rows.position[0] == served.cached
        assert capture.rows.token.tolist() == served.tokens[served.cached : -1]

    def test_decode_rows_join_the_rows_of_the_replay(self, one: Running) -> None:
        decoded, replayed = one.open("chosen-generated"), one.open("chosen-replayed")
        assert one.served.replayed.cached == 0
        assert len(joined(decoded, replayed)[0]) == len(PROMPT) + 5
        assert not differs(decoded, replayed, f"layers.{LAYERS - 1}.output")

    @pytest.mark.parametrize("name", ["generated", "replayed"])
    def test_scores_are_the_log_probs_that_the_server_answered(
        self, one: Running, name: str
    ) -> None:
        answer: Answer = getattr(one.served, name)
        scores = one.open(f"chosen-{name}").scores
        order = np.argsort(scores.rows.position)
        assert scores.rows.position[order].tolist() == list(range(1, len(answer.tokens)))
        assert scores.rows.token[order].tolist() == answer.tokens[1:]
        assert scores.logprob[order].tolist() == given(answer).tolist()
        assert scores.keys.known.all()

    def test_scores_at_another_temperature_are_those_of_the_model(self, one: Running) -> None:
        # the server answers with the log-probs of softmax(logits / 2)
        hot = one.server.generate(PROMPT[:7], 4, rid="chosen-hot", temperature=2.0)
        replayed = one.server.replay(hot.tokens, rid="chosen-hot-replayed")
        scores = one.open("chosen-hot").scores
        drawn = scores.rows.position >= len(hot.prompt)
        assert scores.rows.token[drawn].tolist() == list(hot.output)
        np.testing.assert_allclose(scores.logprob[drawn], given(replayed)[6:], atol=0.1)
        assert np.abs(scores.logprob[drawn] - np.array(hot.output_logprobs)).max() > 0.1

    def test_requests_in_one_pass_are_told_apart(self, one: Running) -> None:
        rids = ["chosen-first", "other-second", "chosen-third"]
        answers = one.server.generate_many([PROMPT[:5], PROMPT[5:12], PROMPT[12:15]], 4, rids=rids)
        capture = one.open("chosen-[ft]*")
        assert [s.name for s in capture.sequences] == ["chosen-first", "chosen-third"]
        for number, answer in enumerate([answers[0], answers[2]]):
            held = capture.rows.sequence == number
            assert capture.rows.token[held].tolist() == answer.tokens[:-1]
        assert capture.keys.known.all()

    def test_every_point_is_what_transformers_computes(
        self, one: Running, small_moe_dir: Path, tmp_path: Path
    ) -> None:
        sequences = [a.tokens for a in one.served.answers]
        trainer = by_transformers(small_moe_dir, sequences, tmp_path / "trainer")
        engine = one.open("chosen-[gcr]*")
        assert_agrees(engine, trainer, every_point(moe=True))
        assert_adds_up(engine)
        assert {seen.how for seen in engine.points.values()} == {"observed"}
        assert dict(engine.info.fingerprints) == dict(trainer.info.fingerprints)

    def test_a_fault_in_decode_alone_shows_in_decode_rows_alone(self, one: Running) -> None:
        one.server.plant("o-proj-permuted:1:decode")
        answer = one.server.generate(PROMPT, 6, rid="chosen-faulty")
        one.server.replay(answer.tokens, rid="chosen-faulty-replayed")
        one.server.plant(None)
        faulty, replayed = one.open("chosen-faulty"), one.open("chosen-faulty-replayed")
        mine, theirs = joined(faulty, replayed)
        decode = faulty.phases == "decode"
        for point, expected in (("layers.1.attn.context", False), ("layers.1.attn.out", True)):
            error = relative_error(faulty.read(point, mine), replayed.read(point, theirs))
            assert np.median(error[~decode]) < 0.03, point
            assert bool(np.median(error[decode]) > 0.03) is expected, point

    def test_a_killed_server_leaves_its_finished_passes(self, one: Running) -> None:
        """The last test of its server, which it ends."""
        before = len(one.open().rows)
        passes = len(list(one.directory.glob("rank-0/pass-*")))

        def generate() -> None:
            try:
                one.server.generate(PROMPT, 500, rid="chosen-killed")
            except ServerError:
                pass

        asking = threading.Thread(target=generate)
        asking.start()
        deadline = time.monotonic() + 60
        while (
            len(list(one.directory.glob("rank-0/pass-*"))) < passes + 10
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        one.server.kill()
        asking.join()
        capture = Capture.open(one.directory)
        assert not capture.finished
        assert any("not finished" in problem for problem in capture.problems)
        assert len(capture.rows) > before
        killed = Capture.open(one.directory, requests="chosen-killed")
        assert killed.keys.known.all()
        for point in ("layers.0.input", "layers.3.attn.q", "layers.3.mlp.expert_ids"):
            assert len(killed.read(point)) == len(killed.rows)
            assert killed.read(point).ndim == len(parse(point).dims)


class TestTwoProcesses:
    def test_two_processes_hold_shards_and_partial_sums(
        self, two: Running, small_moe_dir: Path, tmp_path: Path
    ) -> None:
        engine = two.open()
        sequences = [a.tokens for a in two.served.answers]
        trainer = by_transformers(small_moe_dir, sequences, tmp_path / "trainer")
        assert engine.problems == ()
        assert engine.info.parallel["tp"] == 2
        assert engine.points["layers.1.attn.out"].how == "partial_sum"
        assert_agrees(engine, trainer, every_point(moe=True))
        assert_adds_up(engine)
        assert engine.replica_findings == {}
        shared = engine.info.fingerprints.items() & trainer.info.fingerprints.items()
        assert len(shared) == len(engine.info.fingerprints) > 0

    def test_what_sglang_asks_itself_is_not_captured(self, two: Running) -> None:
        assert two.server.get("/health") is not None
        assert [s.name for s in two.open().sequences] == ["a-generated", "a-cached", "a-replayed"]

    def test_a_fault_on_two_processes_shows_where_it_was_planted(self, two: Running) -> None:
        two.server.plant("o-proj-permuted:2")
        two.server.replay(two.served.replayed.tokens, rid="faulty")
        two.server.plant(None)
        faulty, clean = two.open("faulty"), two.open("a-replayed")
        assert not differs(faulty, clean, "layers.2.attn.context")
        assert differs(faulty, clean, "layers.2.attn.out")


def test_a_broken_table_costs_its_points_alone(small_llama_dir: Path, tmp_path: Path) -> None:
    with sglang_server(
        small_llama_dir,
        capture=tmp_path / "llama",
        points="all",
        fault="",
        environment={"TEST_BROKEN_TAPS": "1"},
    ) as server:
        served = ask(server, "a")
        engine = server.captured()
    trainer = by_transformers(
        small_llama_dir, [a.tokens for a in served.answers], tmp_path / "trainer"
    )
    broken = [p for p in every_point(moe=False) if p.endswith(("embed", "final_norm", "attn.out"))]
    assert_agrees(engine, trainer, [p for p in every_point(moe=False) if p not in broken])
    assert engine.points["layers.0.attn.out"].how == "not_observable"
    assert any("final_norm: RuntimeError: no such field" in p for p in engine.problems)
    assert any("embed: ValueError: holds 39 rows in a pass of 40" in p for p in engine.problems)
    assert not any(engine.has(point).any() for point in broken)
    trained = trainer.scores.logprob[: len(PROMPT) - 1]
    np.testing.assert_allclose(given(served.generated)[: len(PROMPT) - 1], trained, atol=0.2)


def test_a_dense_model_on_two_processes(small_qwen3_dir: Path, tmp_path: Path) -> None:
    with sglang_server(small_qwen3_dir, capture=tmp_path / "qwen3", points="all", tp=2) as server:
        served = ask(server, "a")
        engine = server.captured()
    trainer = by_transformers(
        small_qwen3_dir, [a.tokens for a in served.answers], tmp_path / "trainer"
    )
    assert engine.problems == ()
    assert_agrees(engine, trainer, every_point(moe=False))
    assert_adds_up(engine)
    assert engine.replica_findings == {}
