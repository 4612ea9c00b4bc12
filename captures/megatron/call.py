"""Read from a call of Megatron-core's GPTModel which token each of this rank's rows is.

Megatron flattens activations of [s, b, hidden] with s outermost. A context-parallel rank is called
with its share of every sequence alone: chunks ``rank`` and ``2 * size - 1 - rank`` of ``2 * size``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.batch import RowPart
from layerbisect.captures.errors import CaptureError
from layerbisect.captures.megatron.padding import read_tokens
from layerbisect.captures.rows import Rows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Call:
    """The rows of one forward call on this rank, in the order in which they lie in its grid.

    Args:
        rows: what each row is; ``rows.sequence`` counts the call's sequences from 0.
        sequences: how many sequences the call has, the same on all ranks of a replica.
        grid: how many rows this rank's flattened activations have, padding included.
        index: int64 [row], ascending, each row's place in the grid.
        after: int64 [row], which row holds the sequence's next token, or -1 where none here does.
        last: bool [row], whether the sequence ends with this row as far as is known: padding on the
            right that no argument tells from tokens counts as tokens.
        problems: a sentence on each thing that keeps rows from being compared.
    """

    rows: Rows
    sequences: int
    grid: int
    index: NDArray[np.int64]
    after: NDArray[np.int64]
    last: NDArray[np.bool_]
    problems: tuple[str, ...]


def read_call(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], context: tuple[int, int]
) -> Call | str:
    """Read a call of a GPTModel, or say in a sentence why it cannot be.

    ``context`` is this rank among the context-parallel ranks, and their number.
    """
    given = dict(inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments)
    given |= given.pop("kwargs", {})
    packed = given.get("packed_seq_params")
    refusal = _refusal(given, packed, context[1])
    if refusal:
        return refusal
    problems: list[str] = []
    if given.get("decoder_input") is not None:
        problems.append(
            "decoder_input replaced the embeddings of input_ids, which alone name the rows; "
            "leave decoder_input out"
        )
    if getattr(packed, "qkv_format", None) == "thd":
        return _packed(given, packed, context, problems)
    return _padded(given, context, problems)


def kept_alone(call: Call, kept: NDArray[np.bool_]) -> Call:
    """Leave sequences out, and number the others anew; ``kept`` bool [sequence]."""
    rows = kept[call.rows.sequence]
    number, place = np.cumsum(kept, dtype=np.int32) - 1, np.cumsum(rows) - 1
    held, after = call.rows.take(rows), call.after[rows]
    return replace(
        call,
        rows=replace(held, sequence=number[held.sequence].astype(np.int32)),
        sequences=int(kept.sum()),
        index=call.index[rows],
        after=np.where(after >= 0, place[after], -1),
        last=call.last[rows],
    )


def unscored(call: Call, vocab: int | None) -> Call:
    """Take what comes after a row for unknown where no token of the vocabulary does."""
    if vocab is None:
        return call
    beyond = (call.after >= 0) & (call.rows.token[call.after] >= vocab)
    return replace(call, after=np.where(beyond, -1, call.after), last=call.last | beyond)


def scattered(call: Call, tensor: tuple[int, int]) -> RowPart:
    """Pick the rows whose activations a sequence-parallel rank holds: an equal stretch of the grid.

    ``tensor`` is this rank among the tensor-parallel ranks, and their number. Raises CaptureError
    for a grid that they cannot share equally.
    """
    rank, size = tensor
    if call.grid % size:
        raise CaptureError(
            f"{call.grid} rows cannot be scattered equally over {size} sequence-parallel ranks; "
            "pad the batch to a multiple of their number"
        )
    grid = call.grid // size
    start, stop = np.searchsorted(call.index, [rank * grid, (rank + 1) * grid]).tolist()
    return RowPart(grid, call.index[start:stop] - rank * grid, start, stop)


def _refusal(given: Mapping[str, Any], packed: Any, context_size: int) -> str:
    """Why a call cannot be recorded, or nothing."""
    if given.get("inference_context") is not None or given.get("inference_params") is not None:
        return (
            "a call with an inference_context (a KV cache) was not recorded; "
            "run whole sequences without one"
        )
    if given.get("input_ids") is None:
        if given.get("decoder_input") is not None:
            return (
                "a call with decoder_input and no token IDs was not recorded; "
                "pass input_ids and let the model embed them"
            )
        return (
            "a call without input_ids was not recorded, for nothing else tells its rows; "
            "pass input_ids on every pipeline stage"
        )
    local = getattr(packed, "local_cp_size", None)
    if local is not None and int(local) != context_size:
        return (
            f"a call with a context-parallel group of its own (local_cp_size {int(local)}, the "
            f"job's is {context_size}) was not recorded; switch dynamic context parallelism off"
        )
    return ""


def _padded(given: Mapping[str, Any], context: tuple[int, int], problems: list[str]) -> Call | str:
    """Read a call whose sequences are the rows of [b, s]."""
    rank, size = context
    token = _integers(given["input_ids"])
    if token.ndim != 2:
        return f"input_ids of shape {list(token.shape)} were not recorded; pass [batch, sequence]"
    lanes, width = token.shape
    if size > 1 and width % 2:
        return (
            f"input_ids of {width} columns are no two chunks of a sequence, as context parallelism "
            f"cuts it, and were not recorded; pad sequences to a multiple of {2 * size}"
        )
    column = rank_columns(width * size, rank, size)
    valid = read_tokens(given, lanes, column, width * size, problems)
    first = np.zeros(lanes, np.int64)
    for lane in range(lanes):
        held = np.flatnonzero(valid[lane])
        if not len(held) or held[-1] + 1 == len(held):
            continue
        # only without context parallelism is it known here where a sequence begins
        first[lane] = held[0] if size == 1 else 0
        between = size == 1 and held[-1] + 1 - held[0] != len(held)
        where = "between its tokens" if between else "on the left"
        problems.append(
            f"sequence {lane} has padding {where}, and RoPE counts columns, so its q and k are "
            "rotated by other angles; pad on the right"
        )
    place, lane_of = np.nonzero(valid.T)
    rows = Rows.of(lane_of, column[place] - first[lane_of], token[lane_of, place])
    # the next column is padding, or there is none
    next_valid = np.zeros_like(valid)
    next_valid[:, :-1] = valid[:, 1:]
    last = ~next_valid[lane_of, place]
    if size > 1:
        # where a chunk ends and another rank has the next one, nothing is known of it
        last &= (column[place] + 1 == width * size) | np.append(np.diff(column) == 1, False)[place]
    _check_positions(given.get("position_ids"), token.shape, lane_of, place, rows, problems)
    index = (place * lanes + lane_of).astype(np.int64)
    return Call(rows, lanes, token.size, index, _after(rows), last, tuple(problems))


def _packed(
    given: Mapping[str, Any], packed: Any, context: tuple[int, int], problems: list[str]
) -> Call | str:
    """Read a call whose sequences lie one after the other; ``cu_seqlens`` are of all ranks.

    They alone bound what a token attends to here, so masks are not looked at.
    """
    rank, size = context
    token = _integers(given["input_ids"])
    if token.size != token.shape[-1]:
        return (
            f"input_ids of shape {list(token.shape)} are no pack and were not recorded; pass [1, t]"
        )
    if packed.cu_seqlens_q is None:
        return "a pack without cu_seqlens_q was not recorded; set cu_seqlens_q"
    real = _integers(packed.cu_seqlens_q).reshape(-1)
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    bound = real if padded is None else _integers(padded).reshape(-1)
    length, room = np.diff(real), np.diff(bound)
    told = f"cu_seqlens_q {_short(real)}, cu_seqlens_q_padded {_short(bound)}"
    if len(real) != len(bound) or (length < 0).any() or (length > room).any():
        return f"a pack whose sequences do not fit their places ({told}) was not recorded"
    if size > 1 and (room % (2 * size)).any():
        return (
            f"a pack cut otherwise than each sequence into {2 * size} chunks ({told}) was not "
            f"recorded; pad each sequence to a multiple of {2 * size}"
        )
    if bound[0] or bound[-1] > token.size * size:
        return (
            f"a pack that does not lie in its {token.size} tokens on each of {size} "
            f"context-parallel ranks ({told}) was not recorded"
        )
    position = np.concatenate([np.empty(0, np.int64), *(rank_columns(n, rank, size) for n in room)])
    sequence = np.repeat(np.arange(len(room)), room // size)
    index = np.flatnonzero(position < length[sequence])
    sequence, position = sequence[index], position[index]
    rows = Rows.of(sequence, position, token.reshape(-1)[index])
    lane = np.zeros(len(index), np.int64)
    shape = (1, token.size)
    _check_positions(given.get("position_ids"), shape, lane, index, rows, problems)
    last = position + 1 == length[sequence]
    return Call(rows, len(room), token.size, index, _after(rows), last, tuple(problems))


def rank_columns(total: int, rank: int, size: int) -> NDArray[np.int64]:
    """Which of a sequence's ``total`` columns a context-parallel rank holds, in its order."""
    if size == 1:
        return np.arange(total, dtype=np.int64)
    chunks = np.arange(total, dtype=np.int64).reshape(2 * size, -1)
    return chunks[[rank, 2 * size - 1 - rank]].reshape(-1)


def _check_positions(
    ids: Any,
    shape: tuple[int, ...],
    lane: NDArray[np.intp],
    place: NDArray[np.intp],
    rows: Rows,
    problems: list[str],
) -> None:
    """Compare position_ids, where given, with the rows' places in their sequences."""
    if ids is None or not len(rows):
        return
    told = _integers(ids)
    if told.shape[-2:] not in (shape, (1, shape[1]), shape[1:]):
        problems.append(
            f"position_ids of shape {list(told.shape)} are not cut as input_ids are, "
            f"{list(shape)}: they were not checked"
        )
        return
    told = np.broadcast_to(told, (*told.shape[:-2], *shape)).reshape(-1, *shape)
    wrong = np.argwhere((told[:, lane, place] != rows.position).T)
    if len(wrong):
        row, axis = wrong[0]
        problems.append(
            f"position_ids say {told[axis, lane[row], place[row]]} for position "
            f"{rows.position[row]} of sequence {rows.sequence[row]}; pass position_ids that count "
            "from 0 in each sequence, cut as input_ids are"
        )


def _after(rows: Rows) -> NDArray[np.int64]:
    order = np.lexsort((rows.position, rows.sequence))
    sequence, position = rows.sequence[order], rows.position[order]
    follows = (sequence[1:] == sequence[:-1]) & (position[1:] == position[:-1] + 1)
    after = np.full(len(rows), -1, np.int64)
    after[order[:-1][follows]] = order[1:][follows]
    return after


def _integers(values: torch.Tensor) -> NDArray[np.int64]:
    return values.detach().cpu().numpy().astype(np.int64)


def _short(values: NDArray[np.int64]) -> str:
    return str(values.tolist()) if len(values) < 8 else f"{values[:7].tolist()} ..."
