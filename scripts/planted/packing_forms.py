"""How faults of packing are planted: keys of another document, keys lost, another's logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from layerbisect.captures.attention_seam import replaced
from scripts.planted.fault import Scored

if TYPE_CHECKING:
    import torch

RANKS = 5
"""Context-parallel ranks: the length of a sequence is no multiple of twice as many."""
MISPAIRED = 3
"""The call whose response is scored as another's."""


def visible(q: torch.Tensor, k: torch.Tensor, mask: Any) -> torch.Tensor:
    """Which keys each row may read: bool [lane or 1, 1, row, key]."""
    import torch

    rows, columns = q.shape[2], k.shape[2]
    if mask is None:
        ones = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
        return ones.tril(columns - rows)[None, None]
    allowed: torch.Tensor = mask if mask.dtype == torch.bool else mask >= 0
    return allowed


def as_mask(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask of what may be read, which every implementation takes."""
    import torch

    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill(~allowed, torch.finfo(dtype).min)


def tail_dropped(model: Any, layer: int) -> AbstractContextManager[None]:
    """Each chunk of a context-parallel sequence is taken to be a token shorter than it is."""
    import torch

    def call(inner: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        length, chunks = k.shape[2], 2 * RANKS
        if q.shape[2] < length or length % chunks == 0:
            return inner(module, q, k, v, mask, **kwargs)
        place = torch.arange(length, device=k.device) % math.ceil(length / chunks)
        kept = place < length // chunks
        allowed = visible(q, k, mask) & kept
        context, weights = inner(module, q, k, v, as_mask(allowed, q.dtype), **kwargs)
        return context * kept[None, :, None, None], weights

    return replaced(model.model.layers[layer].self_attn, call)


@contextmanager
def across_documents(model: Any, layer: int) -> Iterator[None]:
    """Each sequence also reads the one before it: of the batch, or else of the call before."""
    import torch

    before: list[torch.Tensor] = []
    document: list[torch.Tensor] = []

    def call(inner: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        first = torch.zeros(len(q), dtype=torch.bool, device=q.device)
        if len(q) > 1:
            others = [x.roll(1, 0) for x in (k, v)]
            first[0] = True
        else:
            if q.shape[2] == k.shape[2]:
                document[:], before[:] = before, [k.clone(), v.clone()]
            others = document
        if not others:
            return inner(module, q, k, v, mask, **kwargs)
        allowed = visible(q, k, mask).expand(len(q), 1, -1, -1)
        # all of the document before it is causal in a packed row
        foreign = ~first[:, None, None, None].expand(-1, 1, q.shape[2], others[0].shape[2])
        keys, values = (torch.cat(x, 2) for x in zip(others, (k, v), strict=True))
        shown = as_mask(torch.cat((foreign, allowed), 3), q.dtype)
        return inner(module, q, keys, values, shown, **kwargs)

    with replaced(model.model.layers[layer].self_attn, call):
        yield


def mispaired(scored: Scored) -> None:
    """One response's tokens are read from the logits of the next sample, in both repeats."""
    import torch

    logits = scored.logits["trainer"][(MISPAIRED + 1) % len(scored.tokens)]
    tokens = torch.from_numpy(scored.tokens[MISPAIRED])[:, None]
    wrong = logits.double().log_softmax(-1).gather(1, tokens)[:, 0].numpy()
    for column in ("C0", "C1"):
        scored.scores[column][MISPAIRED] = wrong.copy()
