"""Log-probs of given tokens from logits, whole or in vocabulary shards, in bounded memory.

    logprob = z[token] / T - log(sum over the vocabulary of exp(z / T)),  z the logits of a row

in nats, with T = 1 for the raw score. All is computed in float32 (float64 for float64 logits), a
chunk of rows at a time, so that [token, vocab] in float32 never exists at once. Beside each score
come the chosen logit ``z[token]``, as the model gave it whatever T is, and the entropy of the
distribution that was scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import TrainerError

if TYPE_CHECKING:
    import torch

CHUNK_VALUES = 1 << 23
"""Logits that are held in float32 at once, unless one row has more."""

# where exp underflows to 0 in float64 too: keeps 0 * -inf out of the entropy of a masked vocabulary
_LOWEST = -1e4


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """The scores of some tokens, float64 [token] each: nat, no unit, nat."""

    logprob: NDArray[np.float64]
    logit: NDArray[np.float64]
    entropy: NDArray[np.float64]

    def first_bad(self) -> int | None:
        """Return the first token whose score is not finite, if there is one."""
        bad = np.flatnonzero(~np.isfinite(self.logprob + self.logit + self.entropy))
        return int(bad[0]) if len(bad) else None


VocabShard = tuple[int, "torch.Tensor"]
"""The vocabulary's first row in a shard, and the shard's logits [row, local vocab]."""


def response_scores(
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    temperature: float | None = None,
    vocab: int | None = None,
    chunk: int = CHUNK_VALUES,
) -> list[TokenScores]:
    """Score the response tokens of a batch by its full logits: row j scores token j + 1.

    Args:
        logits: [batch, length, vocab], any float dtype.
        input_ids: int [batch, length], the tokens that the model saw.
        response_mask: [batch, length] of 0 and 1 or bool, which of ``input_ids`` to score.
        temperature: what the logits are divided by; None for raw scores.
        vocab: tokens in the vocabulary, where the logits have padding rows after them.
        chunk: logits that are held in float32 at once.

    Returns:
        The scores of each sequence, in its tokens' order.

    Raises:
        TrainerError: shapes that don't fit, a mask that isn't binary or asks for position 0, an ID
            outside the vocabulary, or a score that isn't finite.
    """
    if logits.ndim != 3 or logits.shape[:2] != input_ids.shape:
        raise TrainerError(
            f"logits are {list(logits.shape)} for input_ids {list(input_ids.shape)}; "
            "give [batch, length, vocab] for [batch, length]"
        )
    if response_mask.shape != input_ids.shape:
        raise TrainerError(
            f"the response mask is {list(response_mask.shape)} for input_ids "
            f"{list(input_ids.shape)}; give one value for each input token"
        )
    odd = (response_mask != 0) & (response_mask != 1)
    if odd.any():
        raise TrainerError(
            f"the response mask has the value {response_mask[odd][0].item()}; give 0 or 1"
        )
    active = response_mask.to(logits.device).bool()
    if active[:, 0].any():
        raise TrainerError(
            "the response mask asks for input position 0, which no row of logits predicts; "
            "mask the prompt out"
        )
    sequence, column = active[:, 1:].nonzero(as_tuple=True)
    targets = input_ids.to(logits.device)[sequence, column + 1]
    scores = scores_at(
        logits, (sequence, column), targets, temperature=temperature, vocab=vocab, chunk=chunk
    )
    bad = scores.first_bad()
    if bad is not None:
        raise TrainerError(
            f"the score of sequence {int(sequence[bad])} at input position {int(column[bad]) + 1} "
            f"(token {int(targets[bad])}) is {scores.logprob[bad]}: the logits there are not finite"
        )
    ends = np.cumsum(active.sum(1).cpu().numpy())[:-1]
    parts = (np.split(s, ends) for s in (scores.logprob, scores.logit, scores.entropy))
    return [TokenScores(*each) for each in zip(*parts, strict=True)]


def scores_at(
    logits: torch.Tensor,
    at: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    *,
    temperature: float | None = None,
    vocab: int | None = None,
    chunk: int = CHUNK_VALUES,
) -> TokenScores:
    """Score ``targets`` int [row] by the rows of ``logits`` that the indices ``at`` pick.

    The rest is as :func:`response_scores` has it, save that a score may be other than finite.
    """
    return _scored([(0, logits)], at, targets, temperature, vocab, None, chunk)


def vocab_parallel_scores(
    shards: Sequence[VocabShard],
    targets: torch.Tensor,
    *,
    vocab: int | None = None,
    group: Any = None,
    temperature: float | None = None,
    chunk: int = CHUNK_VALUES,
) -> TokenScores:
    """Score ``targets`` by logits whose vocabulary is sharded, with the normalizer over all shards.

    Args:
        shards: this process's shards, each its first vocabulary row and logits [row, local vocab].
        targets: int [row], the token that each row of logits predicts; the same in every process.
        vocab: tokens in the vocabulary, where padding rows follow them; default all columns.
        group: the process group that holds the other shards; None where ``shards`` are all.
        temperature: what the logits are divided by; None for raw scores.
        chunk: logits that are held in float32 at once.

    Raises:
        TrainerError: as :func:`response_scores`, and shards that don't make the whole vocabulary.
    """
    import torch

    if not shards or any(z.ndim != 2 or len(z) != len(targets) for _, z in shards):
        shapes = [list(z.shape) for _, z in shards]
        raise TrainerError(
            f"logits are {shapes} for {len(targets)} targets; give [row, local vocab] shards with "
            "a row for each target"
        )
    index = (torch.arange(len(targets), device=shards[0][1].device),)
    scores = _scored(shards, index, targets, temperature, vocab, group, chunk)
    bad = scores.first_bad()
    if bad is not None:
        raise TrainerError(
            f"the score of row {bad} (token {int(targets[bad])}) is {scores.logprob[bad]}: "
            "the logits there are not finite"
        )
    return scores


def _scored(
    shards: Sequence[VocabShard],
    index: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    temperature: float | None,
    vocab: int | None,
    group: Any,
    chunk: int,
) -> TokenScores:
    """Score ``targets`` [row] by the rows of the shards' logits that ``index`` picks."""
    import torch

    if temperature is not None and not temperature > 0:
        raise TrainerError(f"the temperature is {temperature}; give a number above 0")
    device = shards[0][1].device
    targets = targets.detach().to(device).long()
    width, vocab = _extent(shards, vocab, group, device)
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < vocab:
        wrong = targets[(targets < 0) | (targets >= vocab)][0].item()
        raise TrainerError(
            f"token ID {wrong} is outside the vocabulary of {vocab}; "
            "give the IDs and the model of one tokenizer"
        )
    step = max(1, chunk // max(1, width))
    parts = []
    for begin in range(0, len(targets), step):
        rows = slice(begin, begin + step)
        picked = tuple(i[rows] for i in index)
        parts.append(_rows(shards, picked, targets[rows], temperature, vocab, group))
    if not parts:
        return TokenScores(*(np.empty(0) for _ in range(3)))
    return TokenScores(*torch.cat(parts, 1).double().cpu().numpy())


def _extent(
    shards: Sequence[VocabShard], vocab: int | None, group: Any, device: torch.device
) -> tuple[int, int]:
    """The largest process's columns, and the vocabulary, which the shards must make up."""
    import torch

    stop = max(start + z.shape[-1] for start, z in shards)
    facts = torch.tensor([sum(z.shape[-1] for _, z in shards), stop], device=device)
    width, most = _reduced(facts, "MAX", group).tolist()
    vocab = most if vocab is None else vocab
    real = sum(max(0, min(start + z.shape[-1], vocab) - start) for start, z in shards)
    held = int(_reduced(torch.tensor([real], device=device), "SUM", group))
    if held != vocab:
        raise TrainerError(
            f"the shards hold {held} rows of a vocabulary of {vocab}; "
            "give every shard once, with its own first row"
        )
    return int(width), vocab


def _rows(
    shards: Sequence[VocabShard],
    index: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    temperature: float | None,
    vocab: int,
    group: Any,
) -> torch.Tensor:
    """Log-prob, chosen logit and entropy of some rows, [3, row]."""
    import torch

    pieces = []
    for start, logits in shards:
        piece = logits.detach()[index][:, : max(0, vocab - start)]
        pieces.append((start, piece.to(torch.promote_types(piece.dtype, torch.float32))))
    sums = pieces[0][1].new_zeros(4, len(targets))
    total, weighted, logit, hits = sums
    for start, piece in pieces:
        local = targets - start
        mine = ((local >= 0) & (local < piece.shape[1])).nonzero().squeeze(-1)
        logit[mine] += piece[mine, local[mine]]
        hits[mine] += 1
        if temperature is not None:
            piece /= temperature
    peak = sums.new_full(targets.shape, -torch.inf)
    for _, piece in pieces:
        if piece.shape[1]:
            peak = torch.maximum(peak, piece.amax(-1))
    peak = _reduced(peak, "MAX", group)
    for _, piece in pieces:
        # log_softmax adds up one by one on a CPU, which rounds the tail of a large vocabulary to
        # one side; a plain sum adds in pairs
        shifted = piece.sub_(peak[:, None]).clamp_(min=_LOWEST)
        power = shifted.exp()
        total += power.sum(-1)
        weighted += power.mul_(shifted).sum(-1)
    sums = _reduced(sums, "SUM", group)
    total, weighted, logit, hits = sums
    if (hits != 1).any():
        raise TrainerError("shards of the vocabulary overlap; give every shard its own first row")
    scaled = logit if temperature is None else logit / temperature
    return torch.stack([scaled - peak - total.log(), logit, total.log() - weighted / total])


def _reduced(values: torch.Tensor, operation: str, group: Any) -> torch.Tensor:
    if group is not None:
        import torch.distributed as dist

        dist.all_reduce(values, getattr(dist.ReduceOp, operation), group=group)
    return values
