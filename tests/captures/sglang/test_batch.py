"""What the rows of an SGLang pass are, on stand-ins for SGLang's batches."""

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from layerbisect.captures.rows import Rows
from layerbisect.captures.sglang.batch import (
    Pass,
    Requests,
    keep_logits,
    prompt_scores,
    sampled_scores,
    samples_raw,
)


class Mode(Enum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    TARGET_VERIFY = 5


@dataclass(eq=False)
class Request:
    """SGLang's request: its prompt and what it has generated so far."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(max_new_tokens=8))
    input_embeds: object = None


def forward_batch(
    mode: Mode, requests: list[Request], spans: list[tuple[int, int]], **more: Any
) -> Any:
    """SGLang's batch that computes positions ``start`` to ``stop`` of each request."""
    tokens: list[int] = []
    positions: list[int] = []
    for request, (start, stop) in zip(requests, spans, strict=True):
        tokens += [*request.origin_input_ids, *request.output_ids][start:stop]
        positions += range(start, stop)
    extends = mode is not Mode.DECODE
    return SimpleNamespace(
        forward_mode=mode,
        rids=[r.rid for r in requests],
        input_ids=torch.tensor(tokens),
        positions=torch.tensor(positions),
        extend_seq_lens_cpu=[stop - start for start, stop in spans] if extends else None,
        extend_prefix_lens_cpu=[start for start, _ in spans] if extends else None,
        extend_logprob_start_lens_cpu=more.pop("starts", [0] * len(spans)) if extends else None,
        extend_input_logprob_token_ids_gpu=more.pop("ids", None),
        lora_ids=more.pop("lora_ids", None),
        mm_inputs=more.pop("mm_inputs", None),
        sampling_info=more.pop("sampling_info", None),
        **more,
    )


def run(requests: Requests, batch: Any, objects: list[Request]) -> Pass:
    found = requests.pass_of(batch, objects)
    assert found is not None
    return found


def triples(rows: Rows) -> list[tuple[int, int, int]]:
    return list(
        zip(rows.sequence.tolist(), rows.position.tolist(), rows.token.tolist(), strict=True)
    )


def test_only_chosen_requests_have_rows() -> None:
    a, b, c = Request("mine-1", [5, 6]), Request("other", [7, 8, 9]), Request("mine-2", [10])
    found = run(
        Requests("mine-*"),
        forward_batch(Mode.EXTEND, [a, b, c], [(0, 2), (0, 3), (0, 1)]),
        [a, b, c],
    )
    assert found.batch.phase == "prefill"
    assert [s.name for s in found.batch.sequences] == ["mine-1", "mine-2"]
    assert triples(found.batch.rows) == [(0, 0, 5), (0, 1, 6), (1, 0, 10)]
    assert found.batch.index.tolist() == [0, 1, 5]
    assert found.batch.grid == 6


@pytest.mark.parametrize("rid", ["HEALTH_CHECK_1", "LAYERBISECT_WARMUP_1", "other"])
def test_a_pass_without_a_chosen_request_is_none(rid: str) -> None:
    requests = Requests("*" if rid != "other" else "mine")
    one = Request(rid, [5, 6])
    assert requests.pass_of(forward_batch(Mode.EXTEND, [one], [(0, 2)]), [one]) is None


def test_decode_has_one_row_a_request() -> None:
    a, b = Request("a", [5, 6], [7]), Request("b", [8], [9, 10])
    found = run(Requests(), forward_batch(Mode.DECODE, [a, b], [(2, 3), (2, 3)]), [a, b])
    assert found.batch.phase == "decode"
    assert triples(found.batch.rows) == [(0, 2, 7), (1, 2, 10)]
    assert [c.end for c in found.chosen] == [3, 3]


def test_tokens_of_a_cached_prefix_are_context_once() -> None:
    one = Request("a", [5, 6, 7, 8])
    requests = Requests()
    first = run(requests, forward_batch(Mode.EXTEND, [one], [(3, 4)]), [one])
    assert triples(first.batch.context) == [(0, 0, 5), (0, 1, 6), (0, 2, 7)]
    one.output_ids.append(9)
    second = run(requests, forward_batch(Mode.DECODE, [one], [(4, 5)]), [one])
    assert not len(second.batch.context)


def test_a_chunk_samples_only_at_the_end_of_the_prompt() -> None:
    one = Request("a", [5, 6, 7, 8])
    requests = Requests()
    first = run(requests, forward_batch(Mode.EXTEND, [one], [(0, 3)]), [one])
    last = run(requests, forward_batch(Mode.EXTEND, [one], [(3, 4)]), [one])
    assert [c.samples for c in first.chosen] == [False]
    assert [c.samples for c in last.chosen] == [True]
    # computed by the first chunk, so no context
    assert not len(last.batch.context)


def test_a_request_for_no_tokens_samples_none() -> None:
    one = Request("a", [5, 6], sampling_params=SimpleNamespace(max_new_tokens=0))
    found = run(Requests(), forward_batch(Mode.EXTEND, [one], [(0, 2)]), [one])
    assert [c.samples for c in found.chosen] == [False]


def test_another_request_with_the_same_id_has_another_name() -> None:
    requests = Requests()
    names = []
    for prompt in ([5, 6], [7, 8, 9]):
        one = Request("same", prompt)
        for span in ((0, 1), (1, 2)):
            batch = forward_batch(Mode.EXTEND, [one], [span])
            names.append(run(requests, batch, [one]).batch.sequences[0].name)
    assert names == ["same", "same", "same#2", "same#2"]


def test_adapters_and_images_are_in_the_scoring_context() -> None:
    plain, adapted, seen = Request("a", [5]), Request("b", [5]), Request("c", [5])
    batch = forward_batch(
        Mode.EXTEND,
        [plain, adapted, seen],
        [(0, 1)] * 3,
        lora_ids=[None, "adapter", None],
        mm_inputs=[None, None, object()],
    )
    salts = [s.salt for s in run(Requests(), batch, [plain, adapted, seen]).batch.sequences]
    assert salts == ["", "lora:adapter", "request:c"]


def test_a_pass_that_verifies_drafts_is_refused() -> None:
    one = Request("a", [5, 6])
    with pytest.raises(ValueError, match="TARGET_VERIFY"):
        Requests().pass_of(forward_batch(Mode.TARGET_VERIFY, [one], [(0, 2)]), [one])


def test_rows_that_do_not_add_up_are_refused() -> None:
    one = Request("a", [5, 6])
    batch = forward_batch(Mode.EXTEND, [one], [(0, 2)])
    batch.input_ids = torch.tensor([5, 6, 0])
    with pytest.raises(ValueError, match="3 rows for 1 requests of 2 rows"):
        Requests().pass_of(batch, [one])


def test_prompt_scores_stop_where_the_engine_fills_up() -> None:
    a, b = Request("a", [5, 6, 7]), Request("b", [8, 9, 10, 11])
    # a whole, b a first chunk of two tokens: its last row scores the token of the next chunk
    batch = forward_batch(
        Mode.EXTEND,
        [a, b],
        [(0, 3), (0, 2)],
        starts=[1, 0],
        ids=torch.tensor([7, 0, 9, 10]),
    )
    found = run(Requests(), batch, [a, b])
    output = SimpleNamespace(input_token_logprobs=torch.tensor([-1.0, -9.0, -2.0, -3.0]))
    scores = prompt_scores(found, batch, output)
    assert scores is not None
    assert triples(scores.rows) == [(0, 2, 7), (1, 1, 9), (1, 2, 10)]
    assert scores.logprob.tolist() == [-1.0, -2.0, -3.0]


def test_prompt_scores_of_requests_that_were_not_asked_for_are_left_out() -> None:
    a, b = Request("a", [5, 6]), Request("b", [8, 9])
    ids = torch.tensor([6, 0, 9, 0])
    batch = forward_batch(Mode.EXTEND, [a, b], [(0, 2), (0, 2)], ids=ids)
    found = run(Requests("b"), batch, [a, b])
    scores = prompt_scores(found, batch, SimpleNamespace(input_token_logprobs=-torch.arange(4.0)))
    assert scores is not None
    assert triples(scores.rows) == [(0, 1, 9)]
    assert scores.logprob.tolist() == [-2.0]


def test_prompt_scores_are_none_without_log_probs() -> None:
    one = Request("a", [5, 6])
    batch = forward_batch(Mode.EXTEND, [one], [(0, 2)])
    found = run(Requests(), batch, [one])
    assert prompt_scores(found, batch, SimpleNamespace(input_token_logprobs=None)) is None


@pytest.mark.parametrize("raw", [True, False])
def test_sampled_scores_are_the_engines_own_only_at_temperature_one(raw: bool) -> None:
    a, b = Request("a", [5, 6], [1]), Request("b", [7], [2])
    batch = forward_batch(Mode.DECODE, [a, b], [(2, 3), (1, 2)])
    found = run(Requests(), batch, [a, b])
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 0.0]])
    output = SimpleNamespace(next_token_logits=logits, next_token_logprobs=torch.tensor([-7, -8.0]))
    kept = keep_logits(found, output, 3)
    logits.zero_()
    result = SimpleNamespace(next_token_ids=torch.tensor([2, 0]), logits_output=output)
    scores = sampled_scores(found, kept, result, raw)
    assert scores is not None
    assert triples(scores.rows) == [(0, 3, 2), (1, 2, 0)]
    exact = torch.log_softmax(torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 0.0]]), -1)
    expected = [-7.0, -8.0] if raw else [float(exact[0, 2]), float(exact[1, 0])]
    np.testing.assert_allclose(scores.logprob, expected)


def test_sampling_that_comes_later_gives_no_score() -> None:
    one = Request("a", [5, 6], [1])
    found = run(Requests(), forward_batch(Mode.DECODE, [one], [(2, 3)]), [one])
    assert sampled_scores(found, None, SimpleNamespace(next_token_ids=None), True) is None


@pytest.mark.parametrize(
    ("temperatures", "greedy", "raw"),
    [([1, 1], False, True), ([1, 2], False, False), ([2], True, True)],
)
def test_log_probs_are_raw_at_temperature_one(
    temperatures: list[float], greedy: bool, raw: bool
) -> None:
    info = SimpleNamespace(is_all_greedy=greedy, temperatures=torch.tensor(temperatures))
    assert samples_raw(SimpleNamespace(sampling_info=info)) is raw
