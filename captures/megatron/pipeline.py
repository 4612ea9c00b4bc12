"""Run token sequences through a job's own pipeline schedule, forward only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from layerbisect.captures.megatron.call import rank_columns
from layerbisect.captures.megatron.model import unwrap
from layerbisect.captures.megatron.place import Place

if TYPE_CHECKING:
    from layerbisect.captures.megatron.model import Model


def pipeline_forward(model: Model, *, packed: bool) -> Callable[[Sequence[Sequence[int]]], None]:
    """Make a function that runs token sequences through all stages, each as one micro-batch.

    Every rank of the job calls it with the same sequences. Megatron's schedules allocate on CUDA,
    so on a CPU it runs with stand-ins alone.

    Args:
        model: the job's own list of wrapped chunks, or its one model.
        packed: call the model as a job in ``thd`` format does, with PackedSeqParams; else with
            [1, s], where attention is causal of itself.
    """
    chunks = list(model) if isinstance(model, Sequence) else [model]
    config = unwrap(chunks)[0].config
    place = Place.here(config)

    def run(sequences: Sequence[Sequence[int]]) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        # without variable lengths all stages expect activations of one shape
        fixed = not getattr(config, "variable_seq_lengths", False)
        longest = max(map(len, sequences)) if fixed else 0
        batches = [_arguments(one, longest, place, config, packed) for one in sequences]
        # a virtual pipeline takes micro-batches in groups; what fills one up is not looked at
        group = place.pipeline[1] if len(chunks) > 1 else 1
        batches += batches[-1:] * (-len(batches) % group)
        iterators = [iter(batches) for _ in chunks]
        schedule = get_forward_backward_func()
        with _without_timers(config):
            schedule(
                forward_step_func=_step,
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=chunks,
                num_microbatches=len(batches),
                seq_length=_padded(max(longest, 1), place, config),
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )

    return run


def _step(batches: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Callable[..., None]]:
    """Megatron's forward_step_func: call one chunk on the next micro-batch."""

    def nothing(output: Any, non_loss_data: bool = True) -> None:
        return None

    return model(**next(batches)), nothing


def _arguments(
    tokens: Sequence[int], longest: int, place: Place, config: Any, packed: bool
) -> dict[str, Any]:
    """What a chunk is called with: this context-parallel rank's share, padded on the right."""
    import torch

    length = _padded(max(len(tokens), longest), place, config)
    device = torch.cuda.current_device()
    whole = torch.zeros(length, dtype=torch.int64, device=device)
    whole[: len(tokens)] = torch.tensor(tokens, device=device)
    column = torch.from_numpy(rank_columns(length, *place.context)).to(device)
    ids = whole[column][None]
    arguments: dict[str, Any] = dict(input_ids=ids, position_ids=column[None], attention_mask=None)
    if packed:
        from megatron.core.packed_seq_params import PackedSeqParams

        bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
        arguments["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=length,
            max_seqlen_kv=length,
        )
    return arguments


def _padded(length: int, place: Place, config: Any) -> int:
    """Round up to what context and sequence parallelism, and kernels in fp8, can cut."""
    context, tensor = place.context[1], place.tensor[1]
    each = 2 * context if context > 1 else 1
    rows = (tensor if place.sequence_parallel else 1) * (16 if config.fp8 else 1)
    multiple = math.lcm(each, context * rows)
    return -(-length // multiple) * multiple


@contextmanager
def _without_timers(config: Any) -> Iterator[None]:
    """The job may be within a measurement, and its timers do not nest."""
    timers, config.timers = config.timers, None
    try:
        yield
    finally:
        config.timers = timers
