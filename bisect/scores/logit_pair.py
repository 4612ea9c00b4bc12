"""Two sides' logits and scores of the same tokens: is it the model, or how they are scored?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.hypotheses import CHUNK_VALUES
from layerbisect.bisect.scores.logits import Explanation, checked_vocab, explain, raw_scores
from layerbisect.captures.errors import LayerBisectError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LogitComparison:
    """Where a difference of scores comes from, with full logits of both sides (nat).

    Score first minus second is exactly the sum of three: what the first side's scores differ from
    the raw scores of its own logits (``first_own``), less the same of the second (``second_own``),
    and the difference of the two raw scores (``model``); means of absolute values of each.
    ``logit_mae`` is over all logits, and ``centred_mae`` after each row's mean difference is taken
    out, which cancels in every score. ``explained`` says of each side whose scores are not its raw
    scores what made them.
    """

    rows: int
    mae: float
    first_own: float
    second_own: float
    model: float
    logit_mae: float
    centred_mae: float
    kind: Literal["agree", "cancels", "extraction", "upstream", "both"]
    explained: dict[str, Explanation]
    summary: str


def compare_logits(
    first_logits: torch.Tensor,
    second_logits: torch.Tensor,
    tokens: NDArray[np.int64],
    first_scores: NDArray[np.float64],
    second_scores: NDArray[np.float64],
    *,
    vocab: int | None = None,
    tolerance: float = 0.01,
    first: str = "first",
    second: str = "second",
) -> LogitComparison:
    """Tell a fault of the model from one of the scores' calculation, with both sides' logits.

    ``first`` and ``second`` name the sides. ``vocab`` is needed where the two sides pad the
    vocabulary differently. The rest is as :func:`explain` has it.
    """
    if vocab is None and first_logits.shape[1] != second_logits.shape[1]:
        raise LayerBisectError(
            f"the sides have {first_logits.shape[1]} and {second_logits.shape[1]} logits a row; "
            "say with vocab= how many tokens there are"
        )
    size = checked_vocab(first_logits, tokens, first_scores, vocab)
    checked_vocab(second_logits, tokens, second_scores, vocab)
    raws = raw_scores(first_logits, tokens, size), raw_scores(second_logits, tokens, size)
    gap = float(np.abs(first_scores - second_scores).mean())
    own = {
        first: float(np.abs(first_scores - raws[0]).mean()),
        second: float(np.abs(second_scores - raws[1]).mean()),
    }
    model = float(np.abs(raws[0] - raws[1]).mean())
    logit_mae, centred = _distance(first_logits, second_logits, size)
    sides = {
        name: (logits, scores)
        for name, logits, scores in (
            (first, first_logits, first_scores),
            (second, second_logits, second_scores),
        )
        if own[name] > tolerance
    }
    explained = {
        name: explain(logits, tokens, scores, vocab=size)
        for name, (logits, scores) in sides.items()
    }
    said = [f"{n}'s scores are not those of its logits: {e.summary}" for n, e in explained.items()]
    kind: Literal["agree", "cancels", "extraction", "upstream", "both"]
    if sides:
        kind = "both" if model > tolerance else "extraction"
        said += [f"and the logits differ, by {model:.6f} nat of the raw score"] * (kind == "both")
        said += ["the logits agree"] * (kind == "extraction")
    elif model > tolerance:
        kind = "upstream"
        away = f"{model:.6f} nat of the score"
        said = [f"both score their logits rightly, and these differ, by {away}: go on upstream"]
    elif logit_mae > tolerance >= centred:
        kind = "cancels"
        said = [f"logits differ by {logit_mae:.6f}, a constant in each row, which cancels"]
    else:
        kind = "agree"
        said = ["logits and scores agree"]
    return LogitComparison(
        rows=len(tokens),
        mae=gap,
        first_own=own[first],
        second_own=own[second],
        model=model,
        logit_mae=logit_mae,
        centred_mae=centred,
        kind=kind,
        explained=explained,
        summary="; ".join(said),
    )


def _distance(first: torch.Tensor, second: torch.Tensor, vocab: int) -> tuple[float, float]:
    """Mean absolute difference of logits, and that after each row's mean is taken out."""
    plain = centred = 0.0
    step = max(1, CHUNK_VALUES // vocab)
    for start in range(0, len(first), step):
        rows = slice(start, start + step)
        gap = first[rows, :vocab].detach().float() - second[rows, :vocab].detach().float()
        plain += float(gap.abs().double().sum())
        centred += float(gap.sub_(gap.mean(1, keepdim=True)).abs_().double().sum())
    count = len(first) * vocab
    return plain / count, centred / count
