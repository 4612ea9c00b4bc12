"""Calls of a GPTModel, whole or cut to context-parallel ranks, without a model that computes."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from layerbisect.captures.megatron.call import Call, read_call


class GPTModel:
    """Takes what Megatron-core's GPTModel takes, by the names that 0.16 and 0.19 share."""

    def forward(
        self,
        input_ids: Any,
        position_ids: Any,
        attention_mask: Any,
        decoder_input: Any = None,
        labels: Any = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        extra_block_kwargs: Any = None,
        runtime_gather_output: Any = None,
        *,
        inference_params: Any = None,
        loss_mask: Any = None,
        padding_mask: Any = None,
    ) -> None:
        """Compute nothing."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The part of Megatron-core's PackedSeqParams that says where sequences lie."""

    cu_seqlens_q: Any
    cu_seqlens_q_padded: Any = None
    qkv_format: str = "thd"
    local_cp_size: Any = None


def read(
    ids: Any,
    *,
    context: tuple[int, int] = (0, 1),
    positions: Any = None,
    mask: Any = None,
    **more: Any,
) -> Call:
    """Read a call that can be recorded."""
    call = read_call(GPTModel(), (ids, positions, mask), more, context)
    assert isinstance(call, Call), call
    return call


def refused(ids: Any, *, context: tuple[int, int] = (0, 1), **more: Any) -> str:
    """Read a call that cannot be recorded; returns why."""
    call = read_call(GPTModel(), (ids, None, None), more, context)
    assert isinstance(call, str), call
    return call


def table(call: Call) -> list[tuple[int, int, int]]:
    """List (sequence, position, token) of each row."""
    return [
        (int(s), int(p), int(t))
        for s, p, t in zip(call.rows.sequence, call.rows.position, call.rows.token, strict=True)
    ]


def cumulated(lengths: Sequence[int]) -> torch.Tensor:
    """Cumulated lengths int32 [len + 1], as cu_seqlens have them."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def share_of_pack(rooms: Sequence[int], rank: int, size: int) -> list[int]:
    """Which places of a pack a context-parallel rank holds, in its order.

    Megatron-core leaves this cut to TransformerEngine (``thd_get_partitioned_indices``), which
    needs a GPU; its definition, said once more: each sequence falls into 2 * size equal chunks, of
    which a rank takes one counted from the front and one counted from the back.
    """
    places: list[int] = []
    start = 0
    for room in rooms:
        chunk, rest = divmod(room, 2 * size)
        assert not rest
        front, back = start + rank * chunk, start + room - (rank + 1) * chunk
        places += [*range(front, front + chunk), *range(back, back + chunk)]
        start += room
    return places


def megatron_core() -> None:
    """Import Megatron-core, or skip the test where it is not installed."""
    # SGLang's flash_mla, which Megatron-core tries to import, fails without a GPU
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(
            "megatron.core.models.gpt.gpt_model", reason="Megatron-core is not installed"
        )


@contextmanager
def group(rank: int, size: int) -> Iterator[Any]:
    """A process group of which this process is one rank, and whose others are not there."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def share_of_batch(batch: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Cut [b, s] tensors to a context-parallel rank with Megatron-core's own helper."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    # 0.19 asks for it, and 0.16 does not know it
    names = inspect.signature(get_batch_on_this_cp_rank).parameters
    more = {"is_hybrid_cp": False} if "is_hybrid_cp" in names else {}
    with group(rank, size) as ranks:
        cut: dict[str, Any] = get_batch_on_this_cp_rank(dict(batch), cp_group=ranks, **more)
    return cut


def share_of_sequence(activations: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Scatter [s, b, ...] to a sequence-parallel rank with Megatron-core's own helper."""
    from megatron.core.tensor_parallel.mappings import _split_along_first_dim

    with group(rank, size) as ranks:
        cut: torch.Tensor = _split_along_first_dim(activations, ranks)
    return cut
