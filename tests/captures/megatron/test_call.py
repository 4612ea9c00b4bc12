"""A call of a GPTModel tells which token each of its rows is, on every rank of a layout."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.megatron.call import Call, scattered
from tests.captures.megatron.calling import (
    GPTModel,
    Packed,
    cumulated,
    megatron_core,
    read,
    refused,
    share_of_batch,
    share_of_pack,
    share_of_sequence,
    table,
)

Token = tuple[int, int, int]
sizes = st.integers(1, 4)


def expect_parts(calls: Sequence[Call], whole: Sequence[Token], lengths: Sequence[int]) -> None:
    """Expect that context-parallel ranks hold each token once, and know their neighbours."""
    tables = [table(call) for call in calls]
    assert sorted(row for rows in tables for row in rows) == sorted(whole)
    for call, rows in zip(calls, tables, strict=True):
        assert not call.problems
        assert call.sequences == len(lengths)
        assert (np.diff(call.index) > 0).all() and (call.index < call.grid).all()
        place = {row[:2]: i for i, row in enumerate(rows)}
        nexts = [place.get((sequence, position + 1), -1) for sequence, position, _ in rows]
        assert call.after.tolist() == nexts
        ends = [position + 1 == lengths[sequence] for sequence, position, _ in rows]
        assert call.last.tolist() == ends


def expect_scattered(call: Call, tensor: int, values: torch.Tensor) -> None:
    """Expect that the parts of a call's rows find in Megatron's shares what the rows themselves do.

    ``values`` [s, b] are this context-parallel rank's activations.
    """
    whole = values.reshape(-1)[call.index]
    found, stops = [], [0]
    for rank in range(tensor):
        part = scattered(call, (rank, tensor))
        flat = share_of_sequence(values, rank, tensor).reshape(-1)
        assert part.grid == len(flat)
        assert part.start == stops[-1]
        stops.append(part.stop)
        found.append(flat[part.index])
        assert len(found[-1]) == part.stop - part.start
    assert stops[-1] == len(call.rows)
    assert torch.equal(torch.cat(found), whole)


def test_the_calls_here_are_as_megatron_has_them() -> None:
    megatron_core()
    from megatron.core.models.gpt.gpt_model import GPTModel as Real
    from megatron.core.packed_seq_params import PackedSeqParams

    real = inspect.signature(Real.forward).parameters
    for name, parameter in inspect.signature(GPTModel.forward).parameters.items():
        assert real[name].kind is parameter.kind, name
    ours = list(inspect.signature(GPTModel.forward).parameters)
    assert list(real)[: len(ours)] == ours
    # every field that is set by name alone
    PackedSeqParams(**{name: None for name in Packed.__slots__})


@given(st.integers(1, 3), sizes, sizes, st.integers(1, 3), st.data())
def test_a_batch_cut_by_megatron(
    lanes: int, size: int, tensor: int, chunk: int, data: st.DataObject
) -> None:
    megatron_core()
    width = 2 * size * chunk * tensor
    lengths = [data.draw(st.integers(0, width)) for _ in range(lanes)]
    ids = torch.arange(lanes * width).reshape(lanes, width)
    padding = torch.arange(width) >= torch.tensor(lengths)[:, None]
    batch = {
        "ids": ids,
        "padding_mask": padding if data.draw(st.booleans()) else None,
        "positions": torch.arange(width).expand(lanes, width),
    }
    masked = batch["padding_mask"] is not None
    if not masked:
        lengths = [width] * lanes
    calls = []
    for rank in range(size):
        share = share_of_batch(batch, rank, size)
        calls.append(read(context=(rank, size), **share))
        assert calls[-1].grid == lanes * width // size
        expect_scattered(calls[-1], tensor, share["ids"].T)
    whole = [(i, p, i * width + p) for i in range(lanes) for p in range(lengths[i])]
    if masked and size > 1:
        # where the padding begins with another rank's chunk, its end is not known here
        calls = [_with_ends(call, lengths) for call in calls]
    expect_parts(calls, whole, lengths)


def _with_ends(call: Call, lengths: Sequence[int]) -> Call:
    ends = np.array([p + 1 == lengths[s] for s, p, _ in table(call)], bool)
    assert not (call.last & ~ends).any()
    return replace(call, last=ends)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=4),
    sizes,
    sizes,
    st.integers(0, 5),
    st.data(),
)
def test_a_pack_cut_by_sequences(
    packed: list[tuple[int, int]], size: int, tensor: int, beyond: int, data: st.DataObject
) -> None:
    rooms = [chunks * 2 * size for chunks, _ in packed]
    lengths = [room - min(short, room) for room, (_, short) in zip(rooms, packed, strict=True)]
    if data.draw(st.booleans()):
        # without a padded table, what fills the places counts as tokens
        lengths, params = rooms, Packed(cumulated(rooms))
    else:
        params = Packed(cumulated(lengths), cumulated(rooms))
    total = sum(rooms)
    positions = torch.cat([torch.empty(0, dtype=torch.int64), *map(torch.arange, rooms)])
    starts = cumulated(rooms)
    calls = []
    for rank in range(size):
        places = torch.tensor(share_of_pack(rooms, rank, size), dtype=torch.int64)
        # sequence parallelism pads the share until it can be scattered
        more = beyond + (-(len(places) + beyond)) % tensor
        ids = torch.cat([places, torch.full((more,), total)])[None]
        told = torch.cat([positions[places], torch.zeros(more, dtype=torch.int64)])[None]
        call = read(ids, context=(rank, size), positions=told, packed_seq_params=params)
        assert call.grid == len(places) + more
        parts = [scattered(call, (t, tensor)) for t in range(tensor)]
        assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
        assert parts[-1].stop == len(call.rows)
        index = np.concatenate([p.index + t * p.grid for t, p in enumerate(parts)])
        assert np.array_equal(index, call.index)
        calls.append(call)
    whole = [(i, p, int(starts[i]) + p) for i, n in enumerate(lengths) for p in range(n)]
    expect_parts(calls, whole, lengths)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(2, 4))
def test_positions_in_a_pack_are_those_by_which_megatron_rotates(
    chunks: list[int], size: int
) -> None:
    megatron_core()
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    rooms = [count * 2 * size for count in chunks]
    params = Packed(cumulated(rooms))
    for rank in range(size):
        ids = torch.zeros(1, sum(rooms) // size, dtype=torch.int64)
        call = read(ids, context=(rank, size), packed_seq_params=params)
        angles = [
            _get_thd_freqs_on_this_cp_rank(
                rank, size, torch.empty(room // size), torch.arange(max(rooms))
            )
            for room in rooms
        ]
        assert call.rows.position.tolist() == torch.cat(angles).tolist()


def test_a_pack_takes_one_dimension_or_two() -> None:
    params = Packed(cumulated([2, 3]))
    one = read(torch.arange(5), packed_seq_params=params)
    two = read(torch.arange(5)[None], packed_seq_params=params)
    assert table(one) == table(two) == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3), (1, 2, 4)]
    assert one.after.tolist() == [1, -1, 3, 4, -1]


def test_packed_params_of_a_batch_are_no_pack() -> None:
    params = Packed(cumulated([3]), qkv_format="sbhd", local_cp_size=torch.tensor(1))
    assert len(read(torch.arange(6).reshape(2, 3), packed_seq_params=params).rows) == 6


@pytest.mark.parametrize(
    ("ids", "more", "why"),
    [
        (None, {}, "pass input_ids on every pipeline stage"),
        (None, {"decoder_input": torch.zeros(2, 1, 4)}, "pass input_ids and let the model embed"),
        (torch.zeros(1, 2), {"inference_context": object()}, "KV cache.* without one"),
        (torch.zeros(1, 2), {"inference_params": object()}, "KV cache.* without one"),
        (torch.zeros(4), {}, r"shape \[4\].*pass \[batch, sequence\]"),
        (
            torch.zeros(2, 4),
            {"packed_seq_params": Packed(cumulated([4]))},
            r"\[2, 4\].*pass \[1, t\]",
        ),
        (torch.zeros(1, 4), {"packed_seq_params": Packed(None)}, "without cu_seqlens_q"),
        (
            torch.zeros(1, 4),
            {"packed_seq_params": Packed(cumulated([5]))},
            r"cu_seqlens_q \[0, 5\]",
        ),
        (
            torch.zeros(1, 4),
            {"packed_seq_params": Packed(torch.tensor([1, 4]))},
            r"does not lie in its 4 tokens.*cu_seqlens_q \[1, 4\]",
        ),
        (
            torch.zeros(1, 4),
            {"packed_seq_params": Packed(cumulated([3, 1]), cumulated([2, 2]))},
            r"fit their places \(cu_seqlens_q \[0, 3, 4\], cu_seqlens_q_padded \[0, 2, 4\]\)",
        ),
        (
            torch.zeros(1, 4),
            {"packed_seq_params": Packed(cumulated([4]), local_cp_size=2)},
            "local_cp_size 2, the job's is 1.*switch dynamic",
        ),
    ],
)
def test_what_cannot_be_recorded_says_why(ids: Any, more: dict[str, Any], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(refused(ids, **more))


def test_a_pack_that_is_cut_otherwise_is_not_recorded() -> None:
    # as with Megatron's per-sequence balancing: the pack is cut as if it were one sequence
    params = Packed(cumulated([6, 2]))
    why = refused(torch.zeros(1, 4), context=(0, 2), packed_seq_params=params)
    assert "cut otherwise than each sequence into 4 chunks" in why and "[0, 6, 8]" in why
    assert "no two chunks" in refused(torch.zeros(2, 3), context=(1, 2))


def test_positions_that_differ_are_a_problem() -> None:
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    (problem,) = read(torch.zeros(2, 4), positions=positions).problems
    assert "position_ids say 0 for position 2 of sequence 1" in problem
    # those of the whole, given to a rank that holds a share
    call = read(torch.zeros(1, 4), context=(1, 2), positions=torch.arange(4)[None])
    assert "position_ids say 0 for position 2 of sequence 0" in call.problems[0]
    call = read(torch.zeros(1, 4), context=(1, 2), positions=torch.arange(8)[None])
    assert "[1, 8] are not cut as input_ids are, [1, 4]" in call.problems[0]
    # one for each of the three axes of a multimodal RoPE
    axes = torch.arange(4).expand(3, 2, 4).clone()
    assert not read(torch.zeros(2, 4), positions=axes).problems
    axes[2, 0, 1] = 7
    assert "say 7 for position 1" in read(torch.zeros(2, 4), positions=axes).problems[0]


def test_embeddings_beside_the_tokens_are_a_problem() -> None:
    call = read(torch.zeros(1, 2), decoder_input=torch.zeros(2, 1, 4))
    assert len(call.rows) == 2 and "decoder_input replaced" in call.problems[0]


def test_rows_that_cannot_be_scattered() -> None:
    with pytest.raises(CaptureError, match="3 rows cannot be scattered equally over 2"):
        scattered(read(torch.zeros(1, 3)), (0, 2))
