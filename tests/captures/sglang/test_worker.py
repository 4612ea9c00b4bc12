"""The client of an SGLang worker, against a simulated one: what is sent, and what is refused."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layerbisect.captures.errors import WorkerError
from layerbisect.captures.sglang import worker as sglang_worker
from layerbisect.captures.sglang.reply import ReplyError
from layerbisect.captures.sglang.worker import RAW, Worker
from tests.captures.simulated_worker import Raw, SimulatedWorker, score, simulated_worker
from tests.sglang_server import free_port

PROMPTS = [[1, 2, 3], [4, 5]]
SAMPLING = {**RAW, "max_new_tokens": 4}


@pytest.fixture
def served() -> Iterator[SimulatedWorker]:
    with simulated_worker() as worker:
        yield worker


def test_generation_asks_for_raw_scores_of_all_prompts_at_once(served: SimulatedWorker) -> None:
    answers = Worker(served.url + "/").generate(PROMPTS, SAMPLING)
    (body,) = served.bodies("generate")
    assert body["input_ids"] == PROMPTS and body["return_logprob"] is True
    assert body["sampling_params"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "skip_special_tokens": False,
        "max_new_tokens": 4,
    }
    for prompt, one in zip(PROMPTS, answers, strict=True):
        ids = [*prompt, *one.tokens]
        assert len(one.tokens) == 4 and one.finish == "length" and one.versions == ("1",)
        assert one.scores == tuple(score(ids[: len(prompt) + n + 1]) for n in range(4))


def test_scoring_takes_the_response_alone_and_reuses_no_token(served: SimulatedWorker) -> None:
    (one,) = Worker(served.url).score([[1, 2, 3, 9, 8]], [3])
    (body,) = served.bodies("score")
    assert body["sampling_params"]["max_new_tokens"] == 0 and body["logprob_start_len"] == 0
    assert "lora_path" not in body
    assert one.tokens == (9, 8) and one.scores == (score([1, 2, 3, 9]), score([1, 2, 3, 9, 8]))


def test_adapters_are_named_in_the_order_of_the_sequences(served: SimulatedWorker) -> None:
    Worker(served.url).score([[1, 2], [1, 3]], [1, 1], adapters=[None, "sql"])
    assert served.bodies("score")[0]["lora_path"] == [None, "sql"]


def test_info_names_model_version_engine_and_settings(served: SimulatedWorker) -> None:
    info = Worker(served.url).info()
    assert (info.model, info.weight_version, info.engine) == ("simulated", "1", "sglang 0")
    assert info.settings == {"dtype": "bfloat16", "tp_size": "1"}


def test_an_older_server_is_asked_under_the_older_names(served: SimulatedWorker) -> None:
    served.spoil["/model_info"] = lambda _: Raw("", 404)
    served.spoil["/get_model_info"] = lambda _: {"model_path": "older"}
    assert Worker(served.url).weight_version() is None
    assert Worker(served.url).info().model == "older"


def test_token_ids_that_the_model_does_not_have_are_refused(
    served: SimulatedWorker, tmp_path: Path
) -> None:
    served.spoil["/model_info"] = lambda _: {"model_path": str(tmp_path)}
    assert Worker(served.url).info().vocabulary is None
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 512}}')
    info = Worker(served.url).info()
    info.check_tokens("call 'a'", [1, 511])
    with pytest.raises(WorkerError, match="call 'a' has token ID 512, and .* has 512 tokens"):
        info.check_tokens("call 'a'", [1, 512])


def test_flushing_waits_until_nothing_runs(served: SimulatedWorker) -> None:
    served.busy = 3
    Worker(served.url).flush()
    assert len(served.bodies("/flush_cache")) == 4


def test_flushing_gives_up_on_a_worker_that_others_use(
    served: SimulatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_worker, "FLUSH_SECONDS", 0.3)
    served.busy = 1000
    with pytest.raises(WorkerError, match="did not empty its prefix cache within 0.3 s"):
        Worker(served.url).flush()


def test_a_worker_or_a_router_says_its_model_or_only_answers(served: SimulatedWorker) -> None:
    assert Worker(served.url).model() == "simulated"
    served.spoil["/get_model_info"] = lambda _: {"model_path": "older"}
    answers = (Raw("", 404), Raw("{}"), Raw("[1]"), Raw("no workers", 503), Raw("oops"))
    given = iter(answers)
    served.spoil["/model_info"] = lambda _: next(given)
    for said in ("older", "", "", "older", ""):
        assert Worker(served.url).model() == said
    with pytest.raises(WorkerError, match="is down"):
        Worker(f"http://127.0.0.1:{free_port()}").model()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e300])
def test_a_timeout_must_be_one(timeout: float) -> None:
    with pytest.raises(WorkerError, match="a timeout of .* s is none; give seconds"):
        Worker("http://127.0.0.1:1", timeout=timeout)


@pytest.mark.parametrize(
    ("status", "advice"),
    [(400, "names"), (401, "and whether it is an SGLang worker"), (500, "see its log")],
)
def test_a_refusal_says_what_is_to_be_done(
    served: SimulatedWorker, status: int, advice: str
) -> None:
    served.spoil["score"] = lambda _: Raw("longer than the model's context length", status)
    with pytest.raises(WorkerError, match=f"HTTP {status}: .longer than .*{advice}$"):
        Worker(served.url).score([[1, 2]], [1])


def test_the_digest_stands_for_the_weights_of_all_ranks(served: SimulatedWorker) -> None:
    worker = Worker(served.url)
    first = worker.weights_digest()
    assert first == worker.weights_digest()
    served.weights = "second"
    assert first != worker.weights_digest()
    served.spoil["/weights_checker"] = lambda _: {"ranks": [{"per_gpu_checksum": "second"}] * 2}
    assert worker.weights_digest() not in (None, first)


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_worker_without_checksums_has_no_digest(served: SimulatedWorker, status: int) -> None:
    served.spoil["/weights_checker"] = lambda _: Raw("unknown", status)
    assert Worker(served.url).weights_digest() is None


@pytest.mark.parametrize("reply", [Raw("broken", 500), {"ranks": [{}]}, {"ranks": 3}, [1]])
def test_checksums_that_fail_are_no_missing_digest(served: SimulatedWorker, reply: Any) -> None:
    served.spoil["/weights_checker"] = lambda _: reply
    with pytest.raises(WorkerError, match="asked for checksums of the weights"):
        Worker(served.url).weights_digest()


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://a", "http://", "http://a:b", ""])
def test_an_address_must_be_one(url: str) -> None:
    with pytest.raises(WorkerError, match="no worker's address; give one as http://host:port"):
        Worker(url)


def test_a_worker_that_is_down_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(WorkerError, match=f"^{url}, asked for the model's description .* is down"):
        Worker(url).info()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        # the first half comes in time, and the second does not
        (Raw("[" + " " * 50 + "]", seconds=0.3), "timed out after 0.5 s"),
        (Raw("[]", seconds=5), "timed out after 0.5 s"),
        (Raw("[" * 50, cut=True), "broke off"),
        (Raw("out of memory" * 50, 500), "answered HTTP 500: '(out of memory){15}out o'; see"),
        (Raw("<html>"), "answered what is not JSON: '<html>'"),
        (Raw("[" * 100_000), "answered what is not JSON"),
    ],
    ids=["drips", "silent", "cut", "status", "html", "deep"],
)
def test_an_answer_that_is_none_is_named(served: SimulatedWorker, answer: Raw, said: str) -> None:
    served.spoil["generate"] = lambda _: answer
    began = time.monotonic()
    with pytest.raises(WorkerError, match=said) as caught:
        Worker(served.url, timeout=0.5).generate(PROMPTS, SAMPLING)
    assert time.monotonic() - began < 3
    assert str(caught.value).startswith(f"{served.url}, asked for 2 responses")
    assert "\n" not in str(caught.value)


def meta(key: str, value: Any) -> Any:
    """Spoil one thing in the last reply's meta_info; a function gets what was there."""

    def spoil(reply: Any) -> Any:
        held = reply[-1]["meta_info"]
        held[key] = value(held[key]) if callable(value) else value
        return reply

    return spoil


def entry(key: str, place: int, value: Any) -> Any:
    def spoil(entries: list[Any]) -> list[Any]:
        entries[place] = value(entries[place]) if callable(value) else value
        return entries

    return meta(key, spoil)


def entry_ids(value: Any) -> Any:
    """Spoil the IDs that the last reply says it gave."""

    def spoil(reply: Any) -> Any:
        reply[-1]["output_ids"] = value(reply[-1]["output_ids"])
        return reply

    return spoil


OUTPUT, INPUT = "output_token_logprobs", "input_token_logprobs"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda reply: reply[:1], "gave 1 answers to 2 requests"),
        (lambda reply: [*reply[:1], {"text": ""}], "request 1, which has no meta_info"),
        (lambda _: 7, "gave 1 answers to 2 requests"),
        (meta(OUTPUT, lambda entries: entries[:-1]), "3 scores for the 4 tokens of request 1"),
        (meta(OUTPUT, None), "gave request 1 no output_token_logprobs, but None"),
        (entry(OUTPUT, 2, lambda e: [None, *e[1:]]), "null, which stands for nan, as the score at"),
        (entry(OUTPUT, 2, lambda e: [float("nan"), *e[1:]]), "nan as the score at response posi"),
        (entry(OUTPUT, 2, lambda e: [float("-inf"), *e[1:]]), "-inf as the score at response pos"),
        (entry(OUTPUT, 2, lambda e: ["-1", *e[1:]]), "'-1' as the score at response position 2"),
        (entry(OUTPUT, 2, lambda e: [e[0], 99, None]), "request 1: 99 and not .* position 2"),
        (entry_ids(lambda ids: ids[:-1]), "gave in request 1: 4 scores, and 3 IDs"),
        (entry_ids(lambda _: "[1]"), "gave in request 1: 4 scores, and '.1.'"),
        (entry(OUTPUT, 2, -0.5), "gave -0.5 at place 2 of output_token_logprobs"),
        (entry(OUTPUT, 2, lambda e: [e[0], -1, None]), "at place 2 of output_token_logprobs"),
        (meta("completion_tokens", 5), "4 scores for the 5 tokens of request 1"),
        (meta("finish_reason", {"type": "abort", "message": "oom"}), "ended request 1 by .*oom"),
        (meta("finish_reason", None), "ended request 1 by None"),
        (meta("prompt_tokens", 9), "saw 9 tokens in request 1, where 2 were sent"),
        (meta("cached_tokens", None), "counts None cached tokens among the 2"),
        (meta("cached_tokens", 3), "counts 3 cached tokens among the 2"),
        (meta("weight_versions", 3), "gave 3 as the weight versions"),
    ],
)
def test_a_generation_that_cannot_be_used_is_refused_and_kept(
    served: SimulatedWorker, spoil: Any, said: str
) -> None:
    served.spoil["generate"] = spoil
    with pytest.raises(ReplyError, match=said) as caught:
        Worker(served.url).generate(PROMPTS, SAMPLING)
    assert caught.value.reply.startswith(("[", "7"))


def test_a_response_may_stop_early_and_not_for_length(served: SimulatedWorker) -> None:
    def shorten(reply: Any) -> Any:
        for one in reply:
            one["output_ids"] = one["output_ids"][:2]
            one["meta_info"][OUTPUT] = one["meta_info"][OUTPUT][:2]
            one["meta_info"] |= {"completion_tokens": 2, "finish_reason": {"type": "stop"}}
        return reply

    served.spoil["generate"] = shorten
    answers = Worker(served.url).generate(PROMPTS, SAMPLING)
    assert [(len(one.tokens), one.finish) for one in answers] == [(2, "stop")] * 2
    served.spoil["generate"] = lambda reply: meta("finish_reason", {"type": "length"})(
        shorten(reply)
    )
    with pytest.raises(ReplyError, match="gave 2 tokens to request 1, ended by length"):
        Worker(served.url).generate(PROMPTS, SAMPLING)


def test_all_versions_that_a_response_was_generated_with_are_told(served: SimulatedWorker) -> None:
    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 4}]
    served.spoil["generate"] = meta("weight_versions", spans)
    answers = Worker(served.url).generate(PROMPTS, SAMPLING)
    assert [one.versions for one in answers] == [("1",), ("1", "2")]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (entry(INPUT, 3, lambda e: [e[0], 77, None]), "77 and not 6 at position 3"),
        (entry(INPUT, 0, lambda e: [None, 77, None]), "77 and not 4 at position 0"),
        (meta(INPUT, lambda entries: entries[:-1]), "gave 3 scores for the 4 tokens of request 1"),
        (meta(INPUT, lambda entries: entries[1:]), "gave 3 scores for the 4 tokens of request 1"),
        (entry(INPUT, 3, lambda e: [None, *e[1:]]), "null, .* at response position 1 .token 6."),
        (entry(INPUT, 2, lambda e: [float("nan"), *e[1:]]), "nan as the score at response posit"),
        (meta(INPUT, None), "no input_token_logprobs"),
        (lambda reply: reply[:1], "gave 1 answers to 2 requests"),
    ],
)
def test_a_replay_that_cannot_be_used_is_refused(
    served: SimulatedWorker, spoil: Any, said: str
) -> None:
    served.spoil["score"] = spoil
    with pytest.raises(ReplyError, match=said):
        Worker(served.url).score([[1, 2, 3], [4, 5, 7, 6]], [2, 2])


def test_the_last_token_of_a_vocabulary_may_be_called_0(served: SimulatedWorker) -> None:
    # as SGLang does, while the score is of the token itself
    served.spoil["score"] = entry(INPUT, 3, lambda e: [e[0], 0, None])
    worker, sent = Worker(served.url), [[4, 5, 7, 511]]
    (one,) = worker.score(sent, [2], vocabulary=512)
    assert one.tokens == (7, 511) and one.scores[1] == score(sent[0])
    for vocabulary in (None, 513):
        with pytest.raises(ReplyError, match="0 and not 511 at position 3"):
            worker.score(sent, [2], vocabulary=vocabulary)


def test_a_worker_that_did_not_load_weights_is_named(served: SimulatedWorker) -> None:
    route = "/update_weights_from_disk"
    served.spoil[route] = lambda _: {"success": True}
    Worker(served.url).load_weights("new", "2")
    assert served.bodies(route) == [{"model_path": "new", "weight_version": "2"}]
    answers: list[Any] = [{"success": False}, [], Raw('{"success": false}', 400)]
    # each request takes the next of them
    served.spoil[route] = lambda _: answers.pop()
    while answers:
        with pytest.raises(WorkerError, match="asked for the weights of new"):
            Worker(served.url).load_weights("new")
