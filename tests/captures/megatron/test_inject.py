"""Captured states take the place of a model's own, whichever rows a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.megatron.inject import Injection, States, injected
from layerbisect.captures.megatron.place import Place
from layerbisect.captures.rows import Rows
from tests.captures.megatron.calling import Packed, cumulated, share_of_pack
from tests.captures.megatron.small_gpt import GPTModel

HIDDEN = 3


def own(sequence: int, position: int) -> float:
    return 1000.0 * sequence + position


def run(
    model: GPTModel, place: Place, layer: int, states: States, *calls: dict[str, Any]
) -> tuple[list[torch.Tensor], Injection]:
    """Call the model, as the rank that ``place`` says, with states injected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Place, "here", lambda config: place)
        with injected(model, layer, states) as done:
            found = []
            for call in calls:
                model.stream = call.pop("stream")
                found.append(model(position_ids=None, attention_mask=None, **call))
    return found, done


@dataclass(frozen=True)
class Pack:
    """Sequences in one pack of ``rooms``: a token and an activation for each place of it."""

    rooms: list[int]
    lengths: list[int]

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(s, p) for s, room in enumerate(self.rooms) for p in range(room)]

    @property
    def tokens(self) -> list[int]:
        return [10 * s + p if p < self.lengths[s] else 0 for s, p in self.places]

    def share(self, context: tuple[int, int], tensor: tuple[int, int]) -> list[int]:
        """Which places a rank's stream has: its chunks, and its stretch of them."""
        held = share_of_pack(self.rooms, *context) if context[1] > 1 else range(len(self.places))
        rank, size = tensor
        each = len(held) // size
        return list(held)[rank * each : (rank + 1) * each]


def states_of(pack: Pack, known: Sequence[tuple[int, int]]) -> States:
    rows = Rows.of([s for s, _ in known], [p for _, p in known], [10 * s + p for s, p in known])
    return States(rows, np.array([[-own(s, p) - 0.5] * HIDDEN for s, p in known]).reshape(-1, 3))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    context=st.integers(1, 3),
    tensor=st.integers(1, 3),
    scattered=st.booleans(),
    layer=st.integers(0, 2),
    keywords=st.booleans(),
    data=st.data(),
)
def test_each_rank_replaces_the_rows_that_it_holds(
    lengths: list[int],
    context: int,
    tensor: int,
    scattered: bool,
    layer: int,
    keywords: bool,
    data: st.DataObject,
) -> None:
    multiple = 2 * context * tensor
    pack = Pack([-(-n // multiple) * multiple for n in lengths], lengths)
    tokens = [(s, p) for s, p in pack.places if p < lengths[s]]
    known = data.draw(st.lists(st.sampled_from(tokens), unique=True))
    states = states_of(pack, known)
    replaced = 0
    for rank in range(context * tensor):
        here = Place(
            tensor=(rank % tensor, tensor),
            context=(rank // tensor, context),
            sequence_parallel=scattered,
        )
        called = pack.share(here.context, (0, 1))
        held = pack.share(here.context, here.tensor if scattered else (0, 1))
        stream = torch.tensor([[[own(*pack.places[n])] * HIDDEN] for n in held])
        (found,), done = run(
            GPTModel(keywords=keywords),
            here,
            layer,
            states,
            {
                "stream": stream,
                "input_ids": torch.tensor([[pack.tokens[n] for n in called]]),
                "packed_seq_params": Packed(cumulated(lengths), cumulated(pack.rooms)),
            },
        )
        assert done.problems == []
        replaced += done.replaced if scattered or here.tensor[0] == 0 else 0
        for n, row in zip(held, found, strict=True):
            place = pack.places[n]
            # each layer behind the boundary adds one
            wanted = -own(*place) - 0.5 + 2 - layer if place in known else own(*place) + 2
            assert row.tolist() == [[wanted] * HIDDEN]
        assert done.unknown == sum(pack.places[n] in tokens for n in held) - done.replaced
    assert replaced == len(known)


def padded(*sequences: int) -> dict[str, Any]:
    """A batch [b, s] of sequences of four tokens, of the numbers given."""
    return {
        "stream": torch.tensor([[[own(s, p)] * HIDDEN for s in sequences] for p in range(4)]),
        "input_ids": torch.tensor([[10 * s + p for p in range(4)] for s in sequences]),
    }


def test_sequences_are_counted_over_the_calls() -> None:
    known = [(0, 1), (2, 0), (3, 3)]
    states = states_of(Pack([4] * 4, [4] * 4), known)
    found, done = run(GPTModel(), Place(), 1, states, padded(0, 1), padded(2), padded(3))
    for stream, sequences in zip(found, ((0, 1), (2,), (3,)), strict=True):
        for place in ((s, p) for s in sequences for p in range(4)):
            value = stream[place[1], sequences.index(place[0]), 0].item()
            assert value == (-own(*place) + 0.5 if place in known else own(*place) + 2)
    assert (done.replaced, done.unknown, done.problems) == (3, 13, [])


def test_other_tokens_keep_their_own_states_and_are_told() -> None:
    states = states_of(Pack([4] * 2, [4] * 2), [(1, 2)])
    (_, found), done = run(GPTModel(), Place(), 1, states, padded(0), padded(5))
    assert found[:, 0, 0].tolist() == [own(5, p) + 2 for p in range(4)]
    assert done.problems[0] == (
        "LayerBisectError: position 2 of sequence 1 is token 52 and not 12: "
        "run the sequences of the states, in their order"
    )
    assert done.replaced == 0


def test_a_call_that_says_no_tokens_is_told() -> None:
    states = states_of(Pack([4], [4]), [(0, 2)])
    call = padded(0) | {"input_ids": None}
    (found,), done = run(GPTModel(), Place(), 0, states, call)
    assert found[:, 0, 0].tolist() == [own(0, p) + 2 for p in range(4)]
    assert "a call without input_ids" in done.problems[0]


@pytest.mark.parametrize("layer", [-1, 3])
def test_there_must_be_such_a_boundary(layer: int) -> None:
    states = states_of(Pack([4], [4]), [(0, 2)])
    with pytest.raises(LayerBisectError, match=f"no boundary {layer} in a model of 2 layers"):
        run(GPTModel(), Place(), layer, states)


def test_hooks_go_with_the_context() -> None:
    model = GPTModel()
    run(model, Place(), 2, states_of(Pack([4], [4]), [(0, 2)]), padded(0))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
