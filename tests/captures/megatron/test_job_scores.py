"""Scores of a job's forward are those of the whole logits, whichever part a rank holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.captures.megatron.call import Call, read_call
from layerbisect.captures.megatron.job_scores import JobScores
from layerbisect.captures.megatron.model import unwrap
from layerbisect.captures.megatron.pipeline import pipeline_forward
from layerbisect.captures.megatron.place import Place
from layerbisect.captures.megatron.problems import Problems
from layerbisect.captures.rows import Rows
from tests.captures.megatron.calling import Packed, cumulated, megatron_core, share_of_pack
from tests.captures.megatron.small_gpt import GPTModel

VOCAB, PADDED = 7, 12


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    context=st.integers(1, 3),
    tensor=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_ranks_score_together(lengths: list[int], context: int, tensor: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    sequences = [draw.integers(0, VOCAB, n).tolist() for n in lengths]
    rows = Rows.of(
        np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate([np.arange(n) for n in lengths]),
        np.concatenate(sequences),
    )
    # one call a sequence; logits of what pads it and the vocabulary are large
    streams = []
    for tokens in sequences:
        room = -(-len(tokens) // (2 * context)) * 2 * context
        streams.append(torch.from_numpy(draw.normal(size=(room, PADDED))) * 3)
        streams[-1][:, VOCAB:] = streams[-1][len(tokens) :] = 50.0
    ranks = []
    for rank in range(context * tensor):
        place = Place(tensor=(rank % tensor, tensor), context=(rank // tensor, context))
        model = GPTModel(PADDED)
        problems = Problems()
        scores = JobScores(unwrap(model), place, VOCAB, problems)
        with scores.hooked():
            for tokens, logits in zip(sequences, streams, strict=True):
                room = len(logits)
                held = share_of_pack([room], *place.context) if context > 1 else [*range(room)]
                model.logits = logits[held].chunk(tensor, -1)[place.tensor[0]][:, None]
                model.stream = torch.zeros(len(held), 1, 1)
                ids = torch.tensor([[*tokens, *[0] * (room - len(tokens))]])[:, held]
                packed = Packed(cumulated([room]))
                model(ids, None, None, packed_seq_params=packed)
        ranks.append((scores, problems))
    everyone = [part.resolved(rows) for scores, _ in ranks for part in scores._parts]
    wanted = np.full(len(rows), np.nan)
    for row, (s, p) in enumerate(zip(rows.sequence, rows.position, strict=True)):
        if p + 1 < lengths[s]:
            whole = torch.log_softmax(streams[s][p, :VOCAB], -1)
            wanted[row] = whole[sequences[s][p + 1]]
    for scores, problems in ranks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scores, "_gathered", lambda mine: everyone)
            found = scores.of(rows)
        assert problems == []
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def scored(model: Any, call: Any, rows: Rows) -> tuple[list[float], str]:
    problems = Problems()
    scores = JobScores(unwrap(model), Place(), VOCAB, problems)
    with scores.hooked():
        call()
    return scores.of(rows).tolist(), problems[0]


def test_what_was_not_scored_is_told() -> None:
    rows = Rows.of([0, 0, 1, 1], [0, 1, 0, 1], [3, 4, 3, 5])
    model = GPTModel(PADDED)
    model.logits, model.stream = torch.zeros(2, 1, PADDED), torch.zeros(2, 1, 1)
    found, problem = scored(model, lambda: model(torch.tensor([[3, 4]]), None, None), rows)
    assert problem == "LayerBisectError: 1 of 2 tokens were not scored"
    assert found[0] == pytest.approx(-np.log(VOCAB)) and np.isnan(found[1:]).all()
    # the sequence that was asked for has another second token
    _, problem = scored(model, lambda: model(torch.tensor([[3, 5]]), None, None), rows)
    assert problem == "LayerBisectError: 2 of 2 tokens were not scored"
    _, problem = scored(model, lambda: model(None, None, None), rows)
    assert "a call without input_ids" in problem
    model.logits = torch.zeros(2, 1, 5)
    _, problem = scored(model, lambda: model(torch.tensor([[3, 4]]), None, None), rows)
    assert problem == "ValueError: the logits are of 5 tokens, where 12 were expected"


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    context=st.integers(1, 4),
    tensor=st.integers(1, 4),
    packed=st.booleans(),
    variable=st.booleans(),
    pipeline=st.integers(1, 3),
    chunks=st.integers(1, 2),
)
def test_micro_batches_hold_each_token_once(
    lengths: list[int],
    context: int,
    tensor: int,
    packed: bool,
    variable: bool,
    pipeline: int,
    chunks: int,
) -> None:
    megatron_core()
    from megatron.core import pipeline_parallel

    sequences = [[100 * s + p for p in range(n)] for s, n in enumerate(lengths)]
    models = [GPTModel() for _ in range(chunks)]
    timers = object()
    for model in models:
        model.config = SimpleNamespace(
            num_layers=2, variable_seq_lengths=variable, fp8=None, timers=timers
        )
    found: dict[int, list[Call]] = {}

    def schedule(**given: Any) -> None:
        assert given["forward_only"] and given["model"] == models
        assert models[0].config.timers is None
        iterators = given["data_iterator"] if chunks > 1 else [given["data_iterator"]]
        for iterator in iterators:
            calls = []
            for arguments in iterator:
                call = read_call(model, (), arguments, place.context)
                assert isinstance(call, Call) and call.problems == ()
                assert call.grid % tensor == 0
                if not variable:
                    assert call.grid * context == given["seq_length"]
                calls.append(call)
            assert len(calls) == given["num_microbatches"]
            found[place.context[0]] = calls

    for rank in range(context):
        place = Place(
            tensor=(0, tensor),
            context=(rank, context),
            pipeline=(0, pipeline),
            sequence_parallel=True,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Place, "here", lambda config, place=place: place)
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
            patch.setattr(pipeline_parallel, "get_forward_backward_func", lambda: schedule)
            pipeline_forward(models, packed=packed)(sequences)
        assert models[0].config.timers is timers
    assert len(found[0]) % (pipeline if chunks > 1 else 1) == 0
    for number, tokens in enumerate(sequences):
        rows = Rows.concatenate([calls[number].rows for calls in found.values()])
        held = dict(zip(rows.position.tolist(), rows.token.tolist(), strict=True))
        assert len(held) == len(rows)
        assert [held[p] for p in range(len(tokens))] == tokens
        assert all(token == 0 for p, token in held.items() if p >= len(tokens))
