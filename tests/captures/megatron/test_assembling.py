"""What each rank of a layout writes for itself reads back as the whole, bit by bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from layerbisect.captures.batch import Batch
from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import SequenceInfo, TensorHeader
from layerbisect.captures.megatron.call import Call, scattered
from layerbisect.captures.recorder import Recorder
from layerbisect.captures.rows import Rows
from layerbisect.captures.store import Capture
from layerbisect.captures.writer import CaptureWriter
from tests.captures.conftest import INFO
from tests.captures.megatron.calling import (
    Packed,
    cumulated,
    megatron_core,
    read,
    share_of_batch,
    share_of_pack,
    share_of_sequence,
)

INPUT, QUERY, SLOTS = "layers.0.input", "layers.0.attn.q", "layers.0.mlp.expert_out"
HIDDEN, HEADS, CHANNELS = 4, 6, 2

sizes = st.integers(1, 3)


@dataclass(frozen=True, slots=True)
class Share:
    """A call on one rank, and what it holds: [s, b, hidden] scattered, [s, b, head * channel]."""

    call: Call
    entering: torch.Tensor
    query: torch.Tensor


@dataclass(frozen=True, slots=True)
class Whole:
    """Activations of each sequence before anything is cut: [position, ...]."""

    entering: Sequence[torch.Tensor]
    query: Sequence[torch.Tensor]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def write(
    directory: Path,
    share: Callable[[int, int], Share],
    context: int,
    tensor: int,
    lost: int | None = None,
) -> None:
    """Write a pass on every rank, each by itself, as one process a rank would; ``lost`` does not.

    Context-parallel ranks are the outer ones, and tensor-parallel ranks the inner.
    """
    for number, (outer, inner) in enumerate(product(range(context), range(tensor))):
        if number == lost:
            continue
        held = share(outer, inner)
        shard = (inner * HEADS // tensor, (inner + 1) * HEADS // tensor, HEADS)
        writer = CaptureWriter(
            directory,
            replace(INFO, points=(INPUT, QUERY, SLOTS)),
            rank=number,
            world_size=context * tensor,
            name=f"cp {outer}, tp {inner}",
        )
        recorder = Recorder(
            writer,
            (INPUT, QUERY, SLOTS),
            (),
            head_dim=CHANNELS,
            header_of=lambda point, shard=shard: TensorHeader(  # type: ignore[misc]
                point.dims, {"head": shard} if "head" in point.dims else {}
            ),
            scattered={"input", "mlp.expert_out"},
        )
        names = tuple(SequenceInfo(f"s{i}") for i in range(held.call.sequences))
        part = scattered(held.call, (inner, tensor))
        recorder.begin(
            Batch("forward", names, held.call.rows, held.call.grid, held.call.index, part=part)
        )
        if recorder.batch is None:
            writer.write_pass("forward", names, held.call.rows, {}, {})
        slots = of_slots(held.entering.reshape(-1, HIDDEN))
        for point, value in ((INPUT, held.entering), (QUERY, held.query), (SLOTS, slots)):
            recorder.record(point, lambda value=value: value)  # type: ignore[misc]
        recorder.end()
        writer.finish()


def of_slots(stream: torch.Tensor) -> torch.Tensor:
    """Give each row of [row, hidden] two slots: [row, slot, hidden]."""
    return torch.stack([stream, -stream], 1)


def expect_whole(directory: Path, whole: Whole, lengths: Sequence[int]) -> None:
    """Expect every token once, and the values that it had before they were cut."""
    capture = Capture.open(directory)
    assert not capture.problems
    assert capture.finished and capture.keys.known.all()
    sequence = [int(capture.sequences[s].name[1:]) for s in capture.rows.sequence]
    at = list(zip(sequence, capture.rows.position.tolist(), strict=True))
    assert sorted(at) == [(i, p) for i, n in enumerate(lengths) for p in range(n)]
    for point, values in ((INPUT, whole.entering), (QUERY, whole.query)):
        expected = torch.stack([values[i][p] for i, p in at]).float()
        np.testing.assert_array_equal(capture.read(point), expected.numpy())
    slots = of_slots(torch.from_numpy(capture.read(INPUT)))
    np.testing.assert_array_equal(capture.read(SLOTS), slots.numpy())
    assert not capture.replica_findings


def shares_of_batch(
    lengths: Sequence[int], width: int, context: int, tensor: int
) -> tuple[Whole, Callable[[int, int], Share]]:
    """Cut a batch padded to ``width`` as Megatron-core does."""
    lanes = len(lengths)
    entering, query = random(lanes, width, HIDDEN), random(lanes, width, HEADS, CHANNELS)
    batch = {
        "ids": torch.arange(lanes * width).reshape(lanes, width),
        "padding_mask": torch.arange(width) >= torch.tensor(lengths)[:, None],
        "entering": entering,
        "query": query,
    }

    def share(outer: int, inner: int) -> Share:
        cut = share_of_batch(batch, outer, context)
        call = read(cut["ids"], context=(outer, context), padding_mask=cut["padding_mask"])
        stream, heads = cut["entering"].transpose(0, 1), cut["query"].transpose(0, 1)
        mine = heads.chunk(tensor, dim=2)[inner].flatten(2)
        return Share(call, share_of_sequence(stream.contiguous(), inner, tensor), mine)

    return Whole(list(entering), list(query)), share


def shares_of_pack(
    lengths: Sequence[int], rooms: Sequence[int], context: int, tensor: int
) -> tuple[Whole, Callable[[int, int], Share]]:
    """Cut a pack whose sequences are padded to ``rooms``."""
    total = sum(rooms)
    entering, query = random(total, 1, HIDDEN), random(total, 1, HEADS, CHANNELS)
    params = Packed(cumulated(lengths), cumulated(rooms))

    def share(outer: int, inner: int) -> Share:
        places = torch.tensor(share_of_pack(rooms, outer, context))
        call = read(places[None], context=(outer, context), packed_seq_params=params)
        mine = query[places].chunk(tensor, dim=2)[inner].flatten(2)
        return Share(call, entering[places].chunk(tensor)[inner], mine)

    return Whole(*(list(v.squeeze(1).split(list(rooms))) for v in (entering, query))), share


@given(st.integers(1, 3), sizes, sizes, st.integers(1, 2), st.data())
@settings(max_examples=40)
def test_a_batch_reads_back_whole(
    lanes: int, context: int, tensor: int, chunk: int, data: st.DataObject
) -> None:
    megatron_core()
    width = 2 * context * tensor * chunk
    lengths = [data.draw(st.integers(0, width)) for _ in range(lanes)]
    assume(any(lengths))
    whole, share = shares_of_batch(lengths, width, context, tensor)
    with TemporaryDirectory() as directory:
        write(Path(directory), share, context, tensor)
        expect_whole(Path(directory), whole, lengths)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=3), sizes, sizes
)
@settings(max_examples=40)
def test_a_pack_reads_back_whole(packed: list[tuple[int, int]], context: int, tensor: int) -> None:
    rooms = [chunks * 2 * context * tensor for chunks, _ in packed]
    lengths = [room - min(short, room) for room, (_, short) in zip(rooms, packed, strict=True)]
    assume(any(lengths))
    whole, share = shares_of_pack(lengths, rooms, context, tensor)
    with TemporaryDirectory() as directory:
        write(Path(directory), share, context, tensor)
        expect_whole(Path(directory), whole, lengths)


@pytest.mark.parametrize("lost", range(1, 4))
def test_a_rank_that_is_missing_is_named(lost: int, tmp_path: Path) -> None:
    _, share = shares_of_pack([8, 5], [8, 8], 2, 2)
    write(tmp_path, share, 2, 2, lost)
    capture = Capture.open(tmp_path)
    assert not capture.finished
    assert f"ranks [{lost}] of 4 wrote nothing" in capture.problems
    for point in (INPUT, QUERY):
        with pytest.raises(CaptureError, match=f"{point}: shards do not tile it"):
            capture.read(point)


def test_a_context_parallel_rank_that_is_missing_leaves_no_prefix_behind_it(
    tmp_path: Path,
) -> None:
    _, share = shares_of_pack([8, 5], [8, 8], 2, 1)
    write(tmp_path, share, 2, 1, lost=1)
    capture = Capture.open(tmp_path)
    assert "ranks [1] of 2 wrote nothing" in capture.problems
    # rank 0 has the chunks at both ends: of what lies behind the hole no prefix is known
    assert np.array_equal(capture.keys.known, capture.rows.position < 2)
    assert capture.rows.position.max() == 7


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ([(0, 2), (3, 4)], "shards do not tile it: 25% of the values are on no rank"),
        ([(0, 3), (2, 4)], "shards overlap without being replicas: rank-1"),
        ([(1, 2), (2, 4)], "shards do not tile it"),
    ],
)
def test_shares_that_do_not_tile_are_refused(
    shares: list[tuple[int, int]], why: str, tmp_path: Path
) -> None:
    rows = Rows.of([0] * 4, range(4), range(4))
    for rank, (start, stop) in enumerate(shares):
        writer = CaptureWriter(tmp_path, INFO, rank=rank, world_size=2)
        header = TensorHeader(("row", "hidden"), {"row": (start, stop, 4)})
        values = torch.ones(stop - start, HIDDEN)
        writer.write_pass("forward", [SequenceInfo("s0")], rows, {INPUT: values}, {INPUT: header})
        writer.finish()
    with pytest.raises(CaptureError, match=why):
        Capture.open(tmp_path).read(INPUT)


def test_a_share_of_other_rows_is_refused(tmp_path: Path) -> None:
    rows = Rows.of([0] * 4, range(4), range(4))
    writer = CaptureWriter(tmp_path, INFO)
    header = TensorHeader(("row", "hidden"), {"row": (0, 2, 5)})
    with pytest.raises(CaptureError, match="a share of 5 rows in a pass of 4"):
        writer.write_pass(
            "forward", [SequenceInfo("s0")], rows, {INPUT: torch.ones(2, 4)}, {INPUT: header}
        )
