"""A rollout without a server: prefill a prompt, then decode given tokens one by one.

The tokens are fed and not sampled, so that the result can be compared with a trainer's forward on
the same tokens, while every number comes from the decode path and its KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.scores import logprobs_of
from layerbisect.captures.transformers_calls import cache_name

if TYPE_CHECKING:
    import torch


def decode_like_rollout(
    model: Any,
    token_ids: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    chunk: int | None = None,
    *,
    batch_size: int = 1,
) -> list[NDArray[np.float64]]:
    """Feed whole sequences to a transformers model as a rollout engine would have.

    Args:
        model: a causal language model of transformers.
        token_ids: each sequence's tokens, prompt and response.
        prompt_lengths: how many tokens of each sequence are prefilled, 1 or more.
        chunk: prefill at most so many columns at once; all of them where it is not given.
        batch_size: sequences that are decoded together, padded on the left.

    Returns:
        For each sequence the raw log-probs (nat) of its response tokens.

    Raises:
        LayerBisectError: lengths that do not fit, or a chunk or batch size below 1.
    """
    import torch

    if len(token_ids) != len(prompt_lengths):
        raise LayerBisectError(
            f"got {len(token_ids)} sequences and {len(prompt_lengths)} prompt lengths; "
            "give one prompt length a sequence"
        )
    for number, (tokens, length) in enumerate(zip(token_ids, prompt_lengths, strict=True)):
        if not 1 <= length <= len(tokens):
            raise LayerBisectError(
                f"prompt length {length} of sequence {number} is not between 1 and its "
                f"{len(tokens)} tokens"
            )
    if batch_size < 1 or (chunk is not None and chunk < 1):
        raise LayerBisectError(f"batch size {batch_size} and chunk {chunk} must be 1 or more")
    scores: list[NDArray[np.float64]] = []
    with torch.no_grad():
        for start in range(0, len(token_ids), batch_size):
            part = slice(start, start + batch_size)
            scores += _decode(model, token_ids[part], prompt_lengths[part], chunk)
    return scores


def _decode(
    model: Any, token_ids: Sequence[Sequence[int]], prompts: Sequence[int], chunk: int | None
) -> list[NDArray[np.float64]]:
    import torch
    from transformers import DynamicCache

    # padded on the left to the longest prompt, so that all responses begin in one column
    first = max(prompts)
    offsets = [first - length for length in prompts]
    width = max(o + len(t) for o, t in zip(offsets, token_ids, strict=True))
    ids = np.zeros((len(token_ids), width), np.int64)
    mask = np.zeros((len(token_ids), width), np.int64)
    for row, (offset, tokens) in enumerate(zip(offsets, token_ids, strict=True)):
        ids[row, offset : offset + len(tokens)] = tokens
        mask[row, offset : offset + len(tokens)] = 1
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    step = chunk or first
    cuts = [*range(0, first, step), *range(first, width), width]
    held = {cache_name(model): DynamicCache(config=model.config)}
    values = np.zeros((len(token_ids), width - first))

    def on_device(array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(model.device)

    for start, stop in zip(cuts, cuts[1:], strict=False):
        logits = model(
            input_ids=on_device(ids[:, start:stop]),
            # without padding there is nothing to mask, and engines take their unmasked path
            attention_mask=on_device(mask[:, :stop]) if not mask.all() else None,
            position_ids=on_device(positions[:, start:stop]),
            use_cache=True,
            **held,
        ).logits
        if first <= stop < width:
            values[:, stop - first] = logprobs_of(logits[:, -1], ids[:, stop].copy())
    return [
        values[row, : len(tokens) - prompts[row]].copy() for row, tokens in enumerate(token_ids)
    ]
