"""Collecting from a real SGLang server, on a CPU; one server serves all tests here."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from layerbisect.captures.errors import WorkerError
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.record.replay import replay
from layerbisect.captures.record.rollout import collect
from layerbisect.captures.sglang.worker import Worker
from layerbisect.models import make_tiny
from tests.conftest import SMALL
from tests.sglang_server import Server, sglang_installed, sglang_server

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed"),
]

VOCABULARY = SMALL["vocab"]
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(1, VOCABULARY, 40).tolist() for _ in range(4)]


@dataclass(frozen=True)
class Running:
    server: Server
    worker: Worker
    record: ScoreRecord
    path: Path


@pytest.fixture(scope="module")
def running(small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that prefills less than two of these sequences at once, and one collected record."""
    path = tmp_path_factory.mktemp("rollout") / "r.safetensors"
    with sglang_server(small_moe_dir, arguments=("--chunked-prefill-size", "64")) as server:
        worker = Worker(f"http://127.0.0.1:{server.port}", timeout=120)
        record = collect(worker, PROMPTS, path, samples=2, max_new_tokens=16, step=0)
        yield Running(server, worker, record, path)


def column(record: ScoreRecord, name: str) -> NDArray[np.float64]:
    return np.concatenate([call.scores[name] for call in record])


def test_replays_repeat_to_the_bit_and_are_near_what_generation_said(running: Running) -> None:
    record = ScoreRecord.open(running.path)
    assert record.columns == ("A", "B0", "B1") and len(record) == 8
    a, first, second = (column(record, name) for name in record.columns)
    assert len(a) == 8 * 16 and np.array_equal(first, second)
    # two paths through a bfloat16 model: near, and not the same
    assert 0 < np.abs(a - first).mean() < 0.05
    for name in record.columns:
        said = record.info.columns[name]
        assert said.weight_version == "default" and said.digest is not None
        assert said.engine == "sglang 0.5.23" and said.settings["chunked_prefill_size"] == "64"


def test_no_replayed_token_comes_from_the_cache_where_others_would_share_their_prompt(
    running: Running,
) -> None:
    assert {call.cached["B0"] for call in running.record} == {0}
    running.server.flush()
    # scored from the response on, samples of one prompt read it from each other's cache
    tokens = [call.tokens.tolist() for call in running.record]
    shared = running.server.post(
        "/generate",
        {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": len(PROMPTS[0]) - 1,
        },
    )
    assert any(reply["meta_info"]["cached_tokens"] for reply in shared)


def test_the_last_token_of_the_vocabulary_has_its_own_score(
    running: Running, tmp_path: Path
) -> None:
    last = VOCABULARY - 1
    calls = [Call.of(str(token), PROMPTS[0], [token], {"A": [-1.0]}) for token in (last, 0)]
    record = ScoreRecord(RecordInfo(columns={"A": Scoring()}), calls)
    found = replay(record, running.worker, tmp_path / "r.safetensors", replays=1)
    (reply,) = running.server.post(
        "/generate",
        {
            "input_ids": PROMPTS[:1],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [last, 0],
        },
    )
    told = [score for score, *_ in reply["meta_info"]["output_token_ids_logprobs"][0]]
    assert column(found, "B0") == pytest.approx(told, abs=0.1)
    assert abs(told[0] - told[1]) > 0.5


def test_a_temperature_moves_a_and_not_b(running: Running, tmp_path: Path) -> None:
    record = collect(
        running.worker,
        PROMPTS[:2],
        tmp_path / "r.safetensors",
        max_new_tokens=16,
        replays=1,
        sampling={"temperature": 0.5},
    )
    assert record.info.columns["A"].definition == "temperature"
    # tokens drawn at half the temperature score higher under it
    assert (column(record, "A") - column(record, "B0")).mean() > 0.2


def test_what_the_server_refuses_is_named(running: Running, tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    with pytest.raises(WorkerError, match="answered HTTP 400: .*longer than the model.*context"):
        collect(running.worker, [[1] * 5000], path)
    with pytest.raises(WorkerError, match=f"prompt 0 has token ID {VOCABULARY}, and"):
        collect(running.worker, [[VOCABULARY]], path)
    assert not path.exists()


def test_weights_updated_between_replays_are_named_and_a_is_kept(
    running: Running, small_moe_dir: Path, tmp_path: Path
) -> None:
    other = make_tiny(tmp_path / "other", "qwen3_moe", **SMALL, seed=1)

    def refused(name: str, directory: Path, version: str | None) -> str:
        def update(done: int, _: int) -> None:
            if done == 1:
                running.worker.load_weights(directory, version)

        path = tmp_path / name
        with pytest.raises(WorkerError) as caught:
            collect(running.worker, PROMPTS[:1], path, max_new_tokens=4, progress=update)
        kept = ScoreRecord.open(path)
        assert kept.columns == ("A", "B0") and str(caught.value).endswith(f"{path} keeps A, B0")
        return str(caught.value)

    first = running.worker.weights_digest()
    said = refused("named", small_moe_dir, "1")
    assert "has weight version '1' before B1, where" in said and "had 'default'" in said
    assert running.worker.weights_digest() == first
    said = refused("silent", other, None)
    assert f"had {first} before, under the same weight version '1'" in said
