"""Log-probs from the logits that a pass computes, across pass boundaries.

The logits of a row score the token after it. Within a pass that token is the next row's; after a
sequence's last row it is known only when the next pass (a chunk, a decode step) brings it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.rows import Rows
from layerbisect.captures.writer import Scores

if TYPE_CHECKING:
    import torch

_CHUNK_VALUES = 1 << 25


def logprobs_of(
    logits: torch.Tensor, tokens: NDArray[np.int64], at: NDArray[np.intp] | None = None
) -> NDArray[np.float64]:
    """Raw log-probs in float32 of ``tokens`` (int64 [row]) by logits [row, vocab], in nats.

    ``at`` picks the rows of ``logits`` that the tokens belong to. Works through the rows in chunks,
    so that [row, vocab] in float32 never exists at once.
    """
    import torch

    target = torch.from_numpy(tokens).to(logits.device)
    index = None if at is None else torch.from_numpy(at).to(logits.device)
    step = max(1, _CHUNK_VALUES // logits.shape[-1])
    parts = []
    for start in range(0, len(tokens), step):
        chunk = slice(start, start + step)
        picked = logits[chunk] if index is None else logits[index[chunk]]
        picked = picked.detach().float()
        # log_softmax adds up one by one on a CPU, which rounds the tail of a large vocabulary to
        # one side (by 1e-5 nat, at worst 1e-4); a plain sum adds in pairs
        shifted = picked - picked.amax(-1, keepdim=True)
        chosen = shifted.gather(-1, target[chunk, None]).squeeze(-1)
        parts.append(chosen - shifted.exp_().sum(-1).log_())
    if not parts:
        return np.empty(0, np.float64)
    return torch.cat(parts).double().cpu().numpy()


Pending = tuple[int, "torch.Tensor"]
"""The position of a sequence's last row, and its logits [vocab]."""


def score_pass(
    rows: Rows,
    logits: torch.Tensor,
    before: Mapping[int, Pending],
    *,
    kept: NDArray[np.intp] | None = None,
) -> tuple[Scores, dict[int, Pending]]:
    """Score every token of ``rows`` whose predicting logits are known.

    Args:
        rows: the pass's rows, each sequence's in order of position.
        logits: [row, vocab], the logits computed at these rows.
        before: what earlier passes left pending, by the number that ``rows.sequence`` has here.
        kept: which of ``rows`` the rows of ``logits`` are, where the engine computed only some.

    Returns:
        The scores, and what is pending after this pass.
    """
    place = np.arange(len(rows), dtype=np.intp)
    if kept is not None:
        place = np.full(len(rows), -1, np.intp)
        place[kept] = np.arange(len(kept))
    found: list[Rows] = []
    values: list[NDArray[np.float64]] = []
    after: dict[int, Pending] = {}
    for number in np.unique(rows.sequence).tolist():
        at = np.flatnonzero(rows.sequence == number)
        position, last = rows.position[at], before.get(number)
        if last is not None and last[0] + 1 == position[0]:
            found.append(rows.take(at[:1]))
            values.append(logprobs_of(last[1][None], rows.token[at[:1]]))
        scored = (position[1:] == position[:-1] + 1) & (place[at[:-1]] >= 0)
        found.append(rows.take(at[1:][scored]))
        values.append(logprobs_of(logits, rows.token[at[1:][scored]], place[at[:-1][scored]]))
        if place[at[-1]] >= 0:
            after[number] = (int(position[-1]), logits[place[at[-1]]].detach().clone())
    return Scores(Rows.concatenate(found), np.concatenate(values or [np.empty(0)])), after


class ScoreKeeper:
    """Pairs logits with the tokens that they predict; keeps each sequence's last row of logits."""

    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}

    def score(self, names: list[str], rows: Rows, logits: torch.Tensor) -> Scores:
        """Score every token of ``rows`` whose predicting logits are known.

        ``names`` holds the name of each sequence that ``rows.sequence`` indexes; a name stands for
        one sequence. The rest is as :func:`score_pass` has it.
        """
        numbers = np.unique(rows.sequence).tolist()
        before = {n: p for n in numbers if (p := self._pending.pop(names[n], None))}
        scores, after = score_pass(rows, logits, before)
        self._pending.update({names[number]: pending for number, pending in after.items()})
        return scores
