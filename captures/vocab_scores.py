"""Log-probs from ranks that each hold a part of the vocabulary, put together on reading.

    logprob = z[token] - log(sum over ranks of exp(lse of the rank)),  z the logits of a row

in nats. Every rank writes what it knows alone: the log-sum-exp of its own logits, and the token's
logit where it holds it. Of a row whose next token lies on another rank (the end of a
context-parallel chunk) it writes the logits themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.rows import Rows, find, places

if TYPE_CHECKING:
    import torch

PADDING_NATS = 1e-3
"""From this mean difference on, the probability of a padded vocabulary's padding is told."""

_CHUNK_VALUES = 1 << 25

Vocab = tuple[int, int, int]
"""``[start, stop, total]`` in token IDs; padding of the vocabulary is in none of them."""


@dataclass(frozen=True, slots=True)
class ShardScores:
    """What one rank knows of the scores of a pass.

    ``rows`` are tokens that are predicted here; ``lse`` float64 [row] is the log-sum-exp of this
    rank's logits, ``logit`` float64 [row] the token's own, minus infinity where another rank holds
    it. ``padding`` float64 [row] is the log-sum-exp of logits that are of no token, where the
    engine pads its vocabulary, and is in none of the others. ``pending`` are rows (not the tokens
    after them) whose next token is not on this rank, and ``logits`` float32 [pending, local vocab]
    theirs.
    """

    vocab: Vocab
    rows: Rows
    logit: NDArray[np.float64]
    lse: NDArray[np.float64]
    padding: NDArray[np.float64]
    pending: Rows
    logits: Any

    def resolved(self, tokens: Rows) -> ShardScores:
        """Look the next tokens of what is pending up among ``tokens``; unknown ones are dropped."""
        if not len(self.pending):
            return self
        at = find(tokens, self.pending.sequence, self.pending.position + 1)
        known = at >= 0
        # a token that is none of the vocabulary has no log-prob
        known[known] = tokens.token[at[known]] < self.vocab[2]
        target = tokens.take(at[known])
        logits = np.asarray(self.logits, np.float64)[known]
        mine = (target.token >= self.vocab[0]) & (target.token < self.vocab[1])
        place = np.where(mine, target.token - self.vocab[0], 0)
        logit = np.where(mine, logits[np.arange(len(place)), place], -np.inf)
        return ShardScores(
            self.vocab,
            Rows.concatenate([self.rows, target]),
            np.concatenate([self.logit, logit]),
            np.concatenate([self.lse, _log_sum_exp(logits)]),
            np.concatenate([self.padding, np.full(len(target), -np.inf)]),
            Rows.empty(),
            logits[:0],
        )


def shard_scores(
    logits: torch.Tensor, vocab: Vocab, rows: Rows, after: NDArray[np.int64], open_end: NDArray[Any]
) -> ShardScores:
    """Score a pass by this rank's logits, in float32, a chunk of rows at a time.

    Args:
        logits: [row, padded local vocab], the logits at ``rows``; what lies beyond the shard is
            left out.
        vocab: which token IDs they are of.
        rows: the pass's rows on this rank.
        after: int64 [row], the place in ``rows`` of each one's next token, or -1.
        open_end: bool [row], rows whose next token may lie on another rank.
    """
    import torch

    start, stop, _ = vocab
    target = np.flatnonzero(after >= 0)
    token = torch.from_numpy(rows.token[after[target]]).to(logits.device)
    step = max(1, _CHUNK_VALUES // max(1, logits.shape[-1]))
    columns: list[list[torch.Tensor]] = [[torch.empty(0)] for _ in range(3)]
    for begin in range(0, len(target), step):
        chunk = slice(begin, begin + step)
        index = torch.from_numpy(target[chunk]).to(logits.device)
        whole = logits.detach().index_select(0, index).float()
        picked, padding = whole[:, : stop - start], whole[:, stop - start :]
        mine = (token[chunk] >= start) & (token[chunk] < stop)
        own = torch.full_like(whole[:, 0], -torch.inf)
        held = torch.nonzero(mine).squeeze(1)
        own[held] = picked[held, token[chunk][held] - start]
        for column, values in zip(columns, (own, lse_of(picked), lse_of(padding)), strict=True):
            column.append(values.cpu())
    logit, lse, padded = (torch.cat(column).double().numpy() for column in columns)
    ends = np.flatnonzero(open_end & (after < 0))
    index = torch.from_numpy(ends).to(logits.device)
    return ShardScores(
        vocab,
        rows.take(after[target]),
        logit,
        lse,
        padded,
        rows.take(ends),
        logits.detach().index_select(0, index)[:, : stop - start].float().cpu(),
    )


def combine(
    parts: Sequence[ShardScores],
) -> tuple[Rows, NDArray[np.float64], str | None, float]:
    """Put the ranks' parts of one pass together.

    Returns the scored tokens, their log-probs, a sentence where something is missing (nothing is
    scored by a part of the vocabulary), and how much lower (nat, mean over tokens) a loss over the
    vocabulary's padding, too, scores them.
    """
    if not parts:
        return Rows.empty(), np.empty(0), None, 0.0
    by_vocab: dict[Vocab, list[ShardScores]] = {}
    for part in parts:
        by_vocab.setdefault(part.vocab, []).append(part)
    extents = sorted(by_vocab)
    ends = [0, *(stop for _, stop, _ in extents)]
    totals = {total for _, _, total in extents}
    tiled = all(start == end for (start, _, _), end in zip(extents, ends, strict=False))
    if not tiled or totals != {ends[-1]}:
        held = ", ".join(f"[{start}, {stop})" for start, stop, _ in extents)
        return (
            Rows.empty(),
            np.empty(0),
            f"no log-probs: ranks scored the tokens {held} of a vocabulary of {max(totals)}, "
            "which do not tile it; a rank wrote nothing",
            0.0,
        )
    merged = [_merged(by_vocab[vocab]) for vocab in extents]
    tables = [(keys, table) for keys, table, _ in merged]
    common = tables[0][0]
    for keys, _ in tables[1:]:
        common = np.intersect1d(common, keys)
    most = max(len(keys) for keys, _ in tables)
    logit = np.full(len(common), -np.inf)
    lse, padding = np.full(len(common), -np.inf), np.full(len(common), -np.inf)
    for keys, table in tables:
        at = np.searchsorted(keys, common)
        logit = np.maximum(logit, table.logit[at])
        lse = np.logaddexp(lse, table.lse[at])
        padding = np.logaddexp(padding, table.padding[at])
    rows = tables[0][1].rows.take(np.searchsorted(tables[0][0], common))
    problem = None
    if unlike := sum(table_unlike for *_, table_unlike in merged):
        problem = f"ranks that hold the same logits scored {unlike} tokens differently"
    if most > len(common):
        problem = f"{most - len(common)} tokens were not scored by every rank of the vocabulary"
    seen = np.isfinite(lse)
    leak = float((np.logaddexp(lse, padding) - lse)[seen].mean()) if seen.any() else 0.0
    return rows, logit - lse, problem, leak


def padding_problem(leak: float) -> str | None:
    """Say so where the padding of the vocabulary has a part of the probability (``leak``, nat)."""
    if leak <= PADDING_NATS:
        return None
    return (
        "the rows that pad the vocabulary have a part of the probability: a loss over all of "
        f"its logits scores tokens {leak:.2g} nat lower than this capture, which leaves them out"
    )


def _merged(parts: Sequence[ShardScores]) -> tuple[NDArray[np.int64], ShardScores, int]:
    """Lay the parts of one shard (of context-parallel ranks, or replicas) together, by key.

    Also counts the tokens that replicas scored differently.
    """
    rows = Rows.concatenate([part.rows for part in parts])
    keys, first, again = np.unique(
        places(rows.sequence, rows.position), return_index=True, return_inverse=True
    )
    logits, lses = (np.concatenate([getattr(p, c) for p in parts]) for c in ("logit", "lse"))
    logit, lse = logits[first], lses[first]
    other = _differ(logits, logit[again]) | _differ(lses, lse[again])
    padding = np.concatenate([part.padding for part in parts])[first]
    last = parts[-1]
    table = ShardScores(
        last.vocab, rows.take(first), logit, lse, padding, Rows.empty(), last.logits[:0]
    )
    return keys, table, len(np.unique(again[other]))


def _differ(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.bool_]:
    differ: NDArray[np.bool_] = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    return differ


def lse_of(logits: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp [row] of float32 [row, token]; minus infinity of no tokens."""
    import torch

    if not logits.shape[-1]:
        return torch.full(logits.shape[:1], -torch.inf, device=logits.device)
    # adds in pairs; log_softmax adds one by one on a CPU
    return logits.logsumexp(-1)


def _log_sum_exp(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    if not logits.size:
        return np.full(len(logits), -np.inf)
    top = logits.max(axis=1, keepdims=True)
    # a row of which all is masked out has no probability, and no NaN
    top = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        summed: NDArray[np.float64] = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
    return summed
