"""Log-probability of given tokens under the language-model head, or given its logits.

    logprob = logit[target] - log(sum over the vocabulary of exp(logit)),  logit = hidden @ head.T

in nats. The low-precision form rounds the logits and computes the rest in the compute dtype.
"""

from __future__ import annotations

import torch

from layerbisect.kernels.linear import linear
from layerbisect.kernels.rounding import require_compute_dtype, rounded

# weight elements converted at once: a head can be larger than all else together
TILE_ELEMENTS = 2**25


def logprobs(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    round_to: torch.dtype | None = None,
    chunk: int = 2**23,
) -> torch.Tensor:
    """Score ``targets`` int [row] given ``hidden`` [row, hidden], in nats: [row].

    ``hidden`` is float32 or float64, after the final norm; ``head_weight`` is [vocab, hidden] of
    any float dtype. A negative target asks for nothing and gets nan. At most ``chunk`` logits are
    held at once. Raises TypeError for another dtype and ValueError for shapes that don't fit or a
    target outside the vocabulary.
    """
    require_compute_dtype("hidden", hidden)
    vocab = len(head_weight)
    if targets.shape != hidden.shape[:1] or head_weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            "hidden, head_weight and targets must have shapes [row, hidden], [vocab, hidden] and "
            f"[row], got {list(hidden.shape)}, {list(head_weight.shape)}, {list(targets.shape)}"
        )
    _require_in_vocabulary(targets, vocab)
    result = hidden.new_full(targets.shape, torch.nan)
    asked = torch.where(targets >= 0)[0]
    if not len(asked):
        return result
    states, wanted = hidden[asked], targets[asked].long()
    tile = max(1, min(vocab, TILE_ELEMENTS // hidden.shape[1], chunk))
    step = max(1, chunk // tile)
    starts = range(0, vocab, tile)
    # log of the summed exponentials of each tile, to be summed at the end
    partial = hidden.new_empty(len(starts), len(asked))
    chosen = torch.empty_like(partial[0])
    for index, start in enumerate(starts):
        weight = head_weight[start : start + tile].to(hidden.dtype)
        for begin in range(0, len(asked), step):
            rows = slice(begin, begin + step)
            logits = linear(states[rows], weight, round_to=round_to)
            partial[index, rows] = torch.logsumexp(logits, dim=-1)
            local = wanted[rows] - start
            here = torch.where((local >= 0) & (local < len(weight)))[0]
            chosen[begin + here] = logits[here, local[here]]
    result[asked] = chosen - torch.logsumexp(partial, dim=0)
    return result


def logprob(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    shards: int = 1,
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Score ``targets`` int [row] given ``logits`` [row, vocab], in nats: [row].

    ``logits`` is float32 or float64, and so is the result. A negative target asks for nothing and
    gets nan. With ``shards`` the vocabulary is cut into so many parts of one size, the last perhaps
    smaller, and what is computed of each is combined, as ranks of a vocabulary-parallel head do.
    Raises TypeError for another dtype and ValueError for shapes that don't fit, a target outside
    the vocabulary or ``shards`` below 1.
    """
    require_compute_dtype("logits", logits)
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            "logits and targets must have shapes [row, vocab] and [row], got "
            f"{list(logits.shape)} and {list(targets.shape)}"
        )
    vocab = logits.shape[1]
    _require_in_vocabulary(targets, vocab)
    if shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards}")
    logits = rounded(logits, round_to)
    parts = logits.split(-(-vocab // shards), dim=1)
    total = torch.stack([torch.logsumexp(part, dim=1) for part in parts]).logsumexp(dim=0)
    chosen = logits.gather(1, targets.long().clamp(min=0)[:, None])[:, 0]
    return (chosen - total).masked_fill(targets < 0, torch.nan)


def _require_in_vocabulary(targets: torch.Tensor, vocab: int) -> None:
    if targets.numel() and int(targets.max()) >= vocab:
        raise ValueError(f"targets must be below the vocabulary's {vocab}, got {targets.max()}")
