"""Log-probs from the logits that a pass computes, across pass boundaries.

The logits of a row score the token after it. Within a pass that token is the next row's; after a
sequence's last row it is known only when the next pass (a chunk, a decode step) brings it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.rows import Rows
from layerbisect.captures.writer import Scores

if TYPE_CHECKING:
    import torch

_CHUNK_VALUES = 1 << 25


def logprobs_of(logits: torch.Tensor, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Raw log-softmax in float32 at ``tokens`` (int64 [row]) of logits [row, vocab], in nats.

    Works through the rows in chunks, so that [row, vocab] in float32 never exists at once.
    """
    import torch

    target = torch.from_numpy(tokens).to(logits.device)
    step = max(1, _CHUNK_VALUES // logits.shape[-1])
    parts = [
        torch.log_softmax(logits[i : i + step].float(), dim=-1)
        .gather(-1, target[i : i + step, None])
        .squeeze(-1)
        for i in range(0, len(logits), step)
    ]
    if not parts:
        return np.empty(0, np.float64)
    return torch.cat(parts).double().cpu().numpy()


class ScoreKeeper:
    """Pairs logits with the tokens that they predict; keeps each sequence's last row of logits."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[int, torch.Tensor]] = {}

    def score(self, names: list[str], rows: Rows, logits: torch.Tensor) -> Scores:
        """Score every token of ``rows`` whose predicting logits are known.

        Args:
            names: name of each sequence that ``rows.sequence`` indexes.
            rows: the pass's rows, each sequence's in order of position.
            logits: [row, vocab], the logits computed at these rows.
        """
        found: list[Rows] = []
        values: list[NDArray[np.float64]] = []
        for number, name in enumerate(names):
            at = np.flatnonzero(rows.sequence == number)
            if not len(at):
                continue
            position, last = rows.position[at], self._pending.pop(name, None)
            if last is not None and last[0] + 1 == position[0]:
                found.append(rows.take(at[:1]))
                values.append(logprobs_of(last[1][None], rows.token[at[:1]]))
            follows = position[1:] == position[:-1] + 1
            found.append(rows.take(at[1:][follows]))
            values.append(logprobs_of(logits[at[:-1][follows]], rows.token[at[1:][follows]]))
            self._pending[name] = (int(position[-1]), logits[at[-1]].detach().clone())
        return Scores(Rows.concatenate(found), np.concatenate(values or [np.empty(0)]))
