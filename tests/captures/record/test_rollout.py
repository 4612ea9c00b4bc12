"""Collecting A and B: A is on disk first and stays, whatever becomes of the replays."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerbisect.captures.errors import LayerBisectError, RecordError, WorkerError
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.record.replay import replay
from layerbisect.captures.record.rollout import collect, definition_of
from layerbisect.captures.sglang import worker as sglang_worker
from layerbisect.captures.sglang.worker import RAW, Worker
from tests.captures.simulated_worker import Raw, SimulatedWorker, simulated_worker
from tests.sglang_server import free_port

PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture
def served() -> Iterator[SimulatedWorker]:
    with simulated_worker() as worker:
        yield worker


@pytest.fixture
def other() -> Iterator[SimulatedWorker]:
    with simulated_worker() as worker:
        yield worker


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "r.safetensors"


def after(passes: int, action: Callable[[], None]) -> Callable[[int, int], None]:
    """Do something once so many requests are done: between two passes."""

    def progress(done: int, _: int) -> None:
        if done == passes:
            action()

    return progress


def test_the_record_says_how_each_column_was_obtained(served: SimulatedWorker, path: Path) -> None:
    told: list[tuple[int, int]] = []
    record = collect(
        Worker(served.url),
        PROMPTS,
        path,
        samples=2,
        max_new_tokens=4,
        groups=["sum", "sort"],
        step=12,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(0, 2), (1, 2), (2, 2)]
    names = ("sum.sample-0", "sum.sample-1", "sort.sample-0", "sort.sample-1")
    kept = ScoreRecord.open(path)
    assert kept.info == record.info and kept.names == names
    assert kept.columns == ("A", "B0", "B1") and kept.info.step == 12
    assert kept.info.model == "simulated" and kept.info.sampling["max_new_tokens"] == 4
    for column in kept.columns:
        said = kept.info.columns[column]
        assert (said.definition, said.engine, said.worker) == ("raw", "sglang 0", served.url)
        assert (said.weight_version, said.batches, said.through) == ("1", (names,), "")
        assert said.digest and said.settings["dtype"] == "bfloat16"
        assert said.cache == ("warm" if column == "A" else "flushed")
    assert kept.info.columns["A"].settings["finish"] == "length 4"
    for call, group, prompt in zip(
        kept, ("sum", "sum", "sort", "sort"), (*PROMPTS[:1] * 2, *PROMPTS[1:] * 2), strict=True
    ):
        assert call.group == group and call.prompt.tolist() == prompt and len(call.response) == 4
        assert np.array_equal(call.scores["A"], call.scores["B0"])
        assert call.cached == {"A": 0, "B0": 0, "B1": 0}


def test_each_pass_replays_the_whole_batch_from_an_empty_cache(
    served: SimulatedWorker, path: Path
) -> None:
    record = collect(Worker(served.url), PROMPTS, path, samples=2, max_new_tokens=4, replays=3)
    work = [kind for kind, _ in served.asked if kind in ("generate", "score", "/flush_cache")]
    assert work == ["generate", *["/flush_cache", "score"] * 3]
    whole = [call.tokens.tolist() for call in record]
    assert [body["input_ids"] for body in served.bodies("score")] == [whole] * 3


def test_a_is_on_disk_before_the_first_replay(served: SimulatedWorker, path: Path) -> None:
    seen: list[tuple[str, ...]] = []

    def look(reply: Any) -> Any:
        seen.append(ScoreRecord.open(path).columns)
        return reply

    served.spoil["score"] = look
    collect(Worker(served.url), PROMPTS, path)
    assert seen == [("A",), ("A", "B0")]


def test_repeats_within_a_worker_over_workers_and_through_a_router(
    served: SimulatedWorker, other: SimulatedWorker, path: Path
) -> None:
    with simulated_worker() as router:
        # it has the routes that requests go through, and answers with the rank that it chose
        router.spoil["/model_info"] = lambda _: Raw("no such route", 404)
        router.spoil["score"] = meta("dp_rank", 3)
        record = collect(
            Worker(served.url),
            PROMPTS,
            path,
            workers=[Worker(other.url)],
            router=Worker(router.url),
        )
    assert record.columns == ("A", "B0", "B1", "B2", "B3", "B4")
    columns = record.info.columns
    found = [(columns[name].worker, columns[name].through) for name in record.columns[1:]]
    assert found == [
        *[(served.url, "")] * 2,
        (other.url, ""),
        *[("", router.url)] * 2,
    ]
    assert columns["B3"].settings == {"dp_ranks": "3"}
    assert [columns[name].digest is None for name in record.columns] == [False] * 4 + [True] * 2


def test_without_digests_no_weights_are_read(served: SimulatedWorker, path: Path) -> None:
    record = collect(Worker(served.url), PROMPTS, path, digests=False)
    assert not served.bodies("/weights_checker")
    assert record.info.columns["B1"].digest is None


@pytest.mark.parametrize(
    ("sampling", "original", "definition"),
    [
        ({}, False, "raw"),
        ({"temperature": 0.9}, False, "temperature"),
        ({"temperature": 0.9}, True, "raw"),
        ({"temperature": 0}, False, "raw"),
        ({"top_p": 0.5, "top_k": 20}, False, "raw"),
        ({"repetition_penalty": 1.1}, False, "behavior"),
        ({"logit_bias": {"3": 1.0}, "temperature": 0.5}, False, "behavior"),
        ({"repetition_penalty": 1.1, "top_p": 0.5}, False, "unknown"),
        ({"min_new_tokens": 4, "temperature": 0.5}, True, "unknown"),
    ],
)
def test_the_definition_of_a_follows_from_how_it_was_sampled(
    sampling: dict[str, Any], original: bool, definition: str
) -> None:
    assert definition_of({**RAW, **sampling}, original) == definition


def test_a_temperature_is_of_generation_alone(served: SimulatedWorker, path: Path) -> None:
    record = collect(Worker(served.url), PROMPTS, path, sampling={"temperature": 0.8})
    assert served.bodies("generate")[0]["sampling_params"]["temperature"] == 0.8
    assert served.bodies("score")[0]["sampling_params"]["temperature"] == 1.0
    assert record.info.sampling["temperature"] == 0.8
    columns = record.info.columns
    assert [columns[c].definition for c in ("A", "B0")] == ["temperature", "raw"]


def meta(key: str, value: Any) -> Callable[[Any], Any]:
    """Spoil one thing in the meta_info of the last answer; a function gets what was there."""

    def spoil(reply: Any) -> Any:
        held = reply[-1]["meta_info"]
        held[key] = value(held[key]) if callable(value) else value
        return reply

    return spoil


def last_entry(change: Callable[[Any, int], list[Any]]) -> Callable[[Any], Any]:
    return meta("input_token_logprobs", lambda found: [*found[:-1], change(*found[-1][:2])])


BROKEN_REPLAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "slow": (lambda _: Raw("[]", seconds=5), "timed out after 0.5 s"),
    "error": (lambda _: Raw("out of memory", 500), "answered HTTP 500: 'out of memory'"),
    "cut": (lambda _: Raw("[[[[", cut=True), "broke off"),
    "not JSON": (lambda _: Raw("oops"), "answered what is not JSON: 'oops'"),
    "other IDs": (
        last_entry(lambda score, token: [score, token + 1]),
        "scored another token than was sent in request 1",
    ),
    "fewer scores": (
        meta("input_token_logprobs", lambda found: found[:-1]),
        "gave 9 scores for the 10 tokens of request 1",
    ),
    "fewer answers": (lambda reply: reply[:1], "gave 1 answers to 2 requests"),
    "null": (last_entry(lambda _, token: [None, token]), "null, which stands for nan, as the sco"),
    "nan": (last_entry(lambda _, token: [float("nan"), token]), "gave nan as the score at respo"),
    "cached": (meta("cached_tokens", 7), "read 7 of the 10 tokens of call 'prompt-1.sample-0'"),
    "other version": (meta("weight_version", "2"), "has weight version '2' in B1, where .* had '1"),
}


@pytest.mark.parametrize("kind", BROKEN_REPLAYS)
def test_a_broken_replay_is_named_and_what_was_whole_is_kept(
    served: SimulatedWorker, path: Path, kind: str
) -> None:
    spoil, said = BROKEN_REPLAYS[kind]
    with pytest.raises(WorkerError, match=said) as caught:
        collect(
            Worker(served.url, timeout=0.5),
            PROMPTS,
            path,
            max_new_tokens=8,
            progress=after(1, lambda: served.spoil.update(score=spoil)),
        )
    message = str(caught.value)
    assert message.startswith(served.url) and message.endswith(f"; {path} keeps A, B0")
    kept = ScoreRecord.open(path)
    assert kept.columns == ("A", "B0")
    assert all(np.array_equal(call.scores["A"], call.scores["B0"]) for call in kept)
    # what was kept can be completed once the worker is well
    served.spoil.clear()
    whole = replay(kept, Worker(served.url), path, replays=1)
    assert whole.columns == ScoreRecord.open(path).columns == ("A", "B0", "B1")


def test_a_worker_that_breaks_before_its_replay_is_named(
    served: SimulatedWorker, other: SimulatedWorker, path: Path
) -> None:
    def broken() -> None:
        other.spoil["/model_info"] = lambda _: Raw("out of memory", 500)

    with pytest.raises(WorkerError, match=f"{other.url}, .* HTTP 500.* keeps A, B0$"):
        collect(
            Worker(served.url),
            PROMPTS,
            path,
            replays=1,
            workers=[Worker(other.url)],
            progress=after(1, broken),
        )
    assert ScoreRecord.open(path).columns == ("A", "B0")


@pytest.mark.parametrize("role", ["worker", "router"])
def test_another_worker_that_is_down_is_found_before_anything_is_generated(
    served: SimulatedWorker, path: Path, role: str
) -> None:
    gone = Worker(f"http://127.0.0.1:{free_port()}")
    others: dict[str, Any] = {"workers": [gone]} if role == "worker" else {"router": gone}
    with pytest.raises(WorkerError, match=f"^{gone.url}, .* is down"):
        collect(Worker(served.url), PROMPTS, path, **others)
    assert not served.bodies("generate") and not path.exists()
    with pytest.raises(WorkerError, match=f"^{gone.url}, .* is down .* keeps A$"):
        replay(saved(call("a")), Worker(served.url), path, **others)
    assert not served.bodies("score")


@pytest.mark.parametrize("role", ["worker", "router"])
def test_a_worker_of_another_model_is_refused_before_anything_is_generated(
    served: SimulatedWorker, other: SimulatedWorker, path: Path, role: str
) -> None:
    other.spoil["/model_info"] = lambda reply: {**reply, "model_path": "larger"}
    one = Worker(other.url)
    others: dict[str, Any] = {"workers": [one]} if role == "worker" else {"router": one}
    said = f"{other.url} serves larger, and {served.url} serves simulated"
    with pytest.raises(WorkerError, match=said):
        collect(Worker(served.url), PROMPTS, path, **others)
    assert not served.bodies("generate") and not path.exists()
    with pytest.raises(WorkerError, match=f"{said}.* keeps A$"):
        replay(saved(call("a")), Worker(served.url), path, **others)


def test_another_workers_weights_are_recorded_under_its_own_digest(
    served: SimulatedWorker, other: SimulatedWorker, path: Path
) -> None:
    # sharded in another way, the same weights have another digest: whoever judges sees both
    other.weights = "second"
    record = collect(Worker(served.url), PROMPTS, path, replays=1, workers=[Worker(other.url)])
    one, two = (record.info.columns[column] for column in ("B0", "B1"))
    assert (one.worker, two.worker) == (served.url, other.url) and one.digest != two.digest


def test_a_cache_that_is_never_emptied_ends_the_collection(
    served: SimulatedWorker, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_worker, "FLUSH_SECONDS", 0.3)
    served.busy = 1000
    with pytest.raises(WorkerError, match="did not empty its prefix cache .* keeps A$"):
        collect(Worker(served.url), PROMPTS, path)
    assert not served.bodies("score") and ScoreRecord.open(path).columns == ("A",)


def test_weights_that_change_between_replays_are_named(served: SimulatedWorker, path: Path) -> None:
    def update() -> None:
        served.version, served.weights = "2", "second"

    with pytest.raises(WorkerError, match="version '2' before B1, where .* had '1'.* keeps A, B0$"):
        collect(Worker(served.url), PROMPTS, path, progress=after(1, update))
    assert ScoreRecord.open(path).columns == ("A", "B0")


def test_an_update_that_keeps_its_versions_name_is_noticed(
    served: SimulatedWorker, path: Path
) -> None:
    def update() -> None:
        served.weights = "second"

    with pytest.raises(WorkerError, match="digest .* before B1, .* the same weight version '1'"):
        collect(Worker(served.url), PROMPTS, path, progress=after(1, update))
    assert ScoreRecord.open(path).columns == ("A", "B0")


def test_weights_that_change_during_a_pass_spoil_it(served: SimulatedWorker, path: Path) -> None:
    def update(reply: Any) -> Any:
        served.version = "2"
        return reply

    served.spoil["score"] = update
    with pytest.raises(WorkerError, match="version '2' after B0, .*; .* keeps A$"):
        collect(Worker(served.url), PROMPTS, path)
    assert ScoreRecord.open(path).columns == ("A",)


def test_weights_that_change_during_generation_are_named_and_a_is_kept(
    served: SimulatedWorker, path: Path
) -> None:
    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 4}]
    served.spoil["generate"] = meta("weight_versions", spans)
    with pytest.raises(WorkerError, match="weight version '2' in A, .* keeps A$"):
        collect(Worker(served.url), PROMPTS, path)
    assert ScoreRecord.open(path).columns == ("A",)


def test_another_workers_weights_must_be_the_same(
    served: SimulatedWorker, other: SimulatedWorker, path: Path
) -> None:
    other.version = "7"
    with pytest.raises(WorkerError, match=f"{other.url} has weight version '7' before A"):
        collect(Worker(served.url), PROMPTS, path, workers=[Worker(other.url)])
    assert not served.bodies("generate") and not path.exists()


def test_a_generation_without_usable_scores_is_kept_beside(
    served: SimulatedWorker, path: Path
) -> None:
    served.spoil["generate"] = meta("completion_tokens", 99)
    for number in range(2):
        with pytest.raises(WorkerError, match="gave 4 scores for the 99 tokens") as caught:
            collect(Worker(served.url), PROMPTS, path, max_new_tokens=4)
        kept = path.with_name(f"r.safetensors.refused{'-1' if number else ''}.json")
        assert str(caught.value).endswith(f"the reply is kept in {kept}")
        reply = json.loads(kept.read_text())
        assert len(reply[0]["meta_info"]["output_token_logprobs"]) == 4
    assert not path.exists()


def test_what_was_generated_before_is_not_overwritten(served: SimulatedWorker, path: Path) -> None:
    collect(Worker(served.url), PROMPTS, path)
    served.asked.clear()
    with pytest.raises(RecordError, match="exists, and what was scored before is never"):
        collect(Worker(served.url), PROMPTS, path)
    assert not served.asked


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompts": []}, "0 prompts and 1 samples"),
        ({"samples": 0}, "2 prompts and 0 samples"),
        ({"prompts": [[1], []]}, "prompt 1 has no token"),
        ({"groups": ["a"]}, "1 different group names for 2 prompts"),
        ({"groups": ["a", "a"]}, "1 different group names for 2 prompts"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"sampling": {"n": 2}}, "sampling has n 2; give it as samples"),
        ({"replays": -1}, "replay -1 times"),
        ({"step": -1}, "step is -1"),
        ({"sampling": {"temperature": float("nan")}}, "sampling has temperature nan"),
        ({"sampling": {"top_p": float("inf")}}, "sampling has top_p inf"),
    ],
)
def test_arguments_that_cannot_be_generate_nothing(
    served: SimulatedWorker, path: Path, changes: dict[str, Any], said: str
) -> None:
    arguments = {"prompts": PROMPTS, **changes}
    with pytest.raises(LayerBisectError, match=said):
        collect(Worker(served.url), path=path, **arguments)
    assert not served.asked


def test_a_place_where_nothing_can_be_written_is_found_before_generating(
    served: SimulatedWorker, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="cannot write"):
        collect(Worker(served.url), PROMPTS, tmp_path / "file" / "r.safetensors")
    assert not served.asked


def test_token_ids_of_another_model_are_not_sent(
    served: SimulatedWorker, path: Path, tmp_path: Path
) -> None:
    served.spoil["/model_info"] = lambda _: {"model_path": str(tmp_path)}
    (tmp_path / "config.json").write_text('{"vocab_size": 4}')
    with pytest.raises(WorkerError, match="prompt 1 has token ID 5, and .* has 4 tokens"):
        collect(Worker(served.url), PROMPTS, path)
    with pytest.raises(WorkerError, match="call 'a' has token ID 5, .* keeps A$"):
        replay(saved(call("a")), Worker(served.url), path)
    assert not served.bodies("generate") and not served.bodies("score")


def saved(*calls: Call, **said: Any) -> ScoreRecord:
    return ScoreRecord(RecordInfo(columns={"A": Scoring(**said)}), calls)


def call(name: str, *, length: int = 3, **more: Any) -> Call:
    return Call.of(name, [1, 2], range(3, 3 + length), {"A": [-1.0] * length}, **more)


def test_a_saved_rollout_gains_replays(served: SimulatedWorker, path: Path) -> None:
    mask = [1, 0, 1]
    record = saved(
        call("turn-1", group="c", turn=1, mask=mask, context={"adapter": "sql"}),
        call("turn-2", group="c", turn=2, length=5),
        weight_version="1",
    )
    found = replay(record, Worker(served.url), path)
    assert found.columns == ScoreRecord.open(path).columns == ("A", "B0", "B1")
    assert found.info.model == "simulated"
    first, second = found
    assert first.mask.tolist() == [True, False, True] and first.scores["A"].tolist() == [-1.0] * 3
    assert (second.group, second.turn) == ("c", 2)
    assert served.bodies("score")[0]["lora_path"] == ["sql", None]


def test_calls_are_replayed_together_as_they_were_generated(
    served: SimulatedWorker, path: Path
) -> None:
    told: list[tuple[int, int]] = []
    calls = [call(name) for name in ("a", "b", "c")]
    replay(
        saved(*calls, batches=(("c", "a"), ("b",))),
        Worker(served.url),
        path,
        progress=lambda done, total: told.append((done, total)),
    )
    assert [len(body["input_ids"]) for body in served.bodies("score")] == [2, 1, 2, 1]
    assert told == [(n, 4) for n in range(5)]


def test_a_large_rollout_is_replayed_in_several_requests(
    served: SimulatedWorker, path: Path
) -> None:
    record = replay(
        saved(*(call(f"c{n}", length=1 + n % 3) for n in range(150))), Worker(served.url), path
    )
    assert [len(b) for b in record.info.columns["B0"].batches] == [64, 64, 22]
    assert all(len(c.scores["B1"]) == len(c.response) for c in record)


def test_a_saved_version_that_the_worker_does_not_have_is_named(
    served: SimulatedWorker, path: Path
) -> None:
    record = saved(call("a"), weight_version="0")
    with pytest.raises(WorkerError, match="version '1' before B0, where A had '0'; .* keeps A$"):
        replay(record, Worker(served.url), path)
    carried = replay(record, Worker(served.url), path, weight_version="1")
    assert carried.info.columns["B0"].weight_version == "1"


def test_tokens_without_a_are_replayed_in_batches_that_are_named(
    served: SimulatedWorker, path: Path
) -> None:
    tokens = saved(call("a"), call("b"), call("c"), weight_version="0").without("A")
    seen: list[bool] = []
    record = replay(
        tokens,
        Worker(served.url),
        path,
        batches=[("c", "a"), ("b",)],
        progress=lambda *_: seen.append(path.exists()),
    )
    assert record.columns == ScoreRecord.open(path).columns == ("B0", "B1")
    assert [len(body["input_ids"]) for body in served.bodies("score")] == [2, 1, 2, 1]
    # a file without a score would be in the way of the next try
    assert seen == [False, False, True, True, True]
    assert record.info.columns["B0"].weight_version == "1"
    gone = Worker(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(WorkerError, match="or correct its URL$"):
        replay(tokens, gone, path.with_name("none"), batches=[])
    assert not path.with_name("none").exists()


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (call("a", context={"image": "sha256:12"}), "generated with image 'sha256:12'"),
        (call("a", positions=[0, 1, 2, 3, 5]), "has positions of its own"),
        (call("a", starts=[0, 2]), "is packed"),
    ],
)
def test_what_token_ids_do_not_replay_is_refused(
    served: SimulatedWorker, path: Path, one: Call, said: str
) -> None:
    with pytest.raises(RecordError, match=said):
        replay(saved(one), Worker(served.url), path)
    assert not served.asked


def test_without_a_there_is_nothing_to_replay(served: SimulatedWorker, path: Path) -> None:
    record = ScoreRecord(
        RecordInfo(columns={"C0": Scoring()}), [Call.of("a", [1], [2], {"C0": [-1.0]})]
    )
    with pytest.raises(RecordError, match="has no column A"):
        replay(record, Worker(served.url), path)
