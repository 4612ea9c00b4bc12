"""Remember, on a transformers KV cache, which tokens it holds.

The memory is an attribute of the cache object, so it is copied with the cache and dies with it. A
cache can be cropped, reordered (beam search) or have its rows selected or repeated between two
calls; so each column of the last layer's keys is digested, and a row of the cache is recognised by
its digests wherever it went.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.lanes import Lane

if TYPE_CHECKING:
    import torch

_ATTRIBUTE = "_layerbisect_lanes"


@dataclass(frozen=True, slots=True)
class _Memory:
    """The lanes of a cache, and digests int64 [lane, column] of its keys, or None if unreadable."""

    lanes: tuple[Lane, ...]
    digests: NDArray[np.int64] | None


def held(cache: Any) -> int:
    """How many columns a cache holds; 0 for no cache."""
    return 0 if cache is None else int(cache.get_seq_length())


def recall(cache: Any, valid: NDArray[np.bool_]) -> tuple[tuple[Lane, ...], str]:
    """Tell the lanes of a cache that is about to be continued.

    Args:
        cache: a cache that holds at least one column.
        valid: bool [lane, column held], False for padding.

    Returns:
        A lane for each row, and a sentence on what is not known, empty where all is.
    """
    columns = valid.shape[1]
    memory: _Memory | None = getattr(cache, _ATTRIBUTE, None)
    strangers = tuple(Lane.unseen(row) for row in valid)
    if memory is None or columns > len(memory.lanes[0].token):
        return strangers, (
            "a call continued a KV cache that was filled outside of the capture, so its rows have "
            "no known prefix; begin the capture before the prefill"
        )
    lanes = tuple(lane.cropped(columns) for lane in memory.lanes)
    if memory.digests is None:
        if len(lanes) != len(valid):
            return strangers, "the rows of a KV cache were changed, and cannot be recognised"
        return lanes, ""
    digests = memory.digests[:, :columns]
    last = _digest(cache, columns - 1, columns)
    if last is not None and np.array_equal(last, digests[:, -1:]):
        setattr(cache, _ATTRIBUTE, _Memory(lanes, digests))
        return lanes, ""
    now = _digest(cache, 0, columns)
    place = {row.tobytes(): n for n, row in enumerate(digests)}
    found = [place.get(row.tobytes()) for row in now] if now is not None else [None] * len(valid)
    lanes = tuple(s if n is None else lanes[n] for s, n in zip(strangers, found, strict=True))
    setattr(cache, _ATTRIBUTE, _Memory(lanes, now))
    if None in found:
        return lanes, "a KV cache was changed between two calls, so its rows have no known prefix"
    return lanes, ""


def remember(cache: Any, lanes: Sequence[Lane]) -> None:
    """Note what a cache holds after a call."""
    columns = len(lanes[0].token)
    memory: _Memory | None = getattr(cache, _ATTRIBUTE, None)
    before = None if memory is None else memory.digests
    if before is not None and len(before) == len(lanes) and before.shape[1] < columns:
        new = _digest(cache, before.shape[1], columns)
        digests = None if new is None else np.concatenate([before, new], axis=1)
    else:
        digests = _digest(cache, 0, columns)
    setattr(cache, _ATTRIBUTE, _Memory(tuple(lanes), digests))


def _digest(cache: Any, start: int, stop: int) -> NDArray[np.int64] | None:
    """Digest columns of the last layer's keys, int64 [lane, column]; None where it cannot be."""
    import torch

    keys: torch.Tensor | None = getattr(cache.layers[-1], "keys", None)
    # a sliding window has dropped columns; a static cache has more, not yet written
    if not isinstance(keys, torch.Tensor) or keys.ndim != 4 or keys.shape[2] < stop:
        return None
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    part = keys.detach()[:, :, start:stop].transpose(1, 2).flatten(2).contiguous()
    part = part.view(bits[part.element_size()]).long()
    # integers wrap around, so the sum does not depend on its order
    factor = torch.arange(part.shape[-1], device=part.device) * 2654435761 + 40503
    digest: NDArray[np.int64] = (part * factor).sum(-1).cpu().numpy()
    return digest
