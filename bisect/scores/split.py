"""Split the difference of two log-probs into the chosen logit's and the normalizer's.

    logprob = chosen logit - normalizer        so, first minus second,
    difference = (difference of chosen logits) - (difference of normalizers)

The normalizer here is chosen logit minus log-prob: where a score was altered after its calculation,
or is of logits over a temperature, that counts to the normalizer, as the logit is the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.record.file import ScoreRecord

SplitKind = Literal["agree", "cancels", "constant", "normalizer", "upstream"]

# tokens that are read of a record: beyond this a mean gets no better
_MOST_TOKENS = 1 << 21
# natural differences of logits may stand beside a fault that is so many times as large
_BESIDE = 4


@dataclass(frozen=True, slots=True)
class SplitReport:
    """Where the difference of two columns of log-probs comes from, first minus second (nat).

    Attributes:
        first, second: the columns' names.
        tokens: how many were compared.
        mae: mean absolute difference of log-probs.
        logit_mae: of chosen logits. normalizer_mae: of normalizers.
        logit_share, normalizer_share: shares of the squared difference of log-probs, which add up
            to 1; each can be negative or above 1, where both differ and cancel.
        kind: ``agree``: log-probs do. ``cancels``: logits differ, and normalizers as much.
            ``constant``: log-probs differ by one number for all tokens. ``normalizer``: chosen
            logits agree, normalizers don't. ``upstream``: the logits differ already.
        summary: what that means, and where to look.
    """

    first: str
    second: str
    tokens: int
    mae: float
    logit_mae: float
    normalizer_mae: float
    logit_share: float
    normalizer_share: float
    kind: SplitKind
    summary: str


def split(
    first_logprob: NDArray[np.float64],
    first_logit: NDArray[np.float64],
    second_logprob: NDArray[np.float64],
    second_logit: NDArray[np.float64],
    *,
    first: str = "first",
    second: str = "second",
    tolerance: float = 0.01,
) -> SplitReport:
    """Split first minus second over tokens, float64 [token] each (nat).

    Raises LayerBisectError for lengths that differ, no tokens, or values that are not finite.
    """
    columns = (first_logprob, first_logit, second_logprob, second_logit)
    lengths = sorted({len(column) for column in columns})
    if len(lengths) > 1 or not lengths[0]:
        raise LayerBisectError(
            f"log-probs and logits have {' and '.join(map(str, lengths))} tokens; give some, and "
            "four columns of the same"
        )
    if not all(np.isfinite(column).all() for column in columns):
        raise LayerBisectError("a log-prob or a logit is not finite; leave such tokens out")
    gap = first_logprob - second_logprob
    logit = first_logit - second_logit
    normalizer = logit - gap
    mae, logit_mae = float(np.abs(gap).mean()), float(np.abs(logit).mean())
    normalizer_mae = float(np.abs(normalizer).mean())
    squared = float(gap @ gap)
    share = float(gap @ logit) / squared if squared else 0.0
    offset = float(np.median(gap))
    spread = float(np.abs(gap - offset).mean())
    sizes = f"chosen logits differ by {logit_mae:.6f} and normalizers by {normalizer_mae:.6f}"
    kind: SplitKind
    if mae <= tolerance:
        kind = "agree" if logit_mae <= tolerance else "cancels"
        summary = (
            "log-probs and logits agree"
            if kind == "agree"
            else f"{sizes}, which cancels: harmless, as a constant added to all logits of a row is"
        )
    elif spread * _BESIDE <= abs(offset) and share <= 0.5:
        kind = "constant"
        way = "above" if offset > 0 else "below"
        summary = (
            f"{first} is {way} {second} by {abs(offset):.6f} for all tokens alike, give or take "
            f"{spread:.6f}, and not by its logits: one of the two was changed after its calculation"
        )
    elif logit_mae <= max(tolerance, mae / _BESIDE) and share <= 0.1:
        kind = "normalizer"
        summary = (
            f"{sizes}: the model is not the cause; look at the temperature, at padded or masked "
            "rows of the vocabulary, at normalizing over one shard or over filtered tokens, and at "
            "what is done to scores afterwards"
        )
    else:
        kind = "upstream"
        summary = f"{sizes}: the logits differ already; go on into the model"
    return SplitReport(
        first=first,
        second=second,
        tokens=len(gap),
        mae=mae,
        logit_mae=logit_mae,
        normalizer_mae=normalizer_mae,
        logit_share=share,
        normalizer_share=1.0 - share if squared else 0.0,
        kind=kind,
        summary=summary,
    )


def split_record(
    record: ScoreRecord, first: str, second: str, *, tolerance: float = 0.01
) -> SplitReport | None:
    """Split first minus second of a record's columns, such as ``B0`` and ``C0``.

    Takes the tokens that the mask keeps and all four columns have, of evenly chosen calls where
    there are very many. None where either column has no logits beside it, or no token is left.
    """
    columns = (first, f"{first}.logit", second, f"{second}.logit")
    if any(column not in record.columns for column in columns):
        return None
    found: list[NDArray[np.float64]] = []
    # the first call tells about how many tokens there are
    every = max(1, len(record) * len(record[0].response) // _MOST_TOKENS)
    for number in range(0, len(record), every):
        call = record[number]
        values = np.stack([call.scores[column] for column in columns])
        found.append(values[:, call.mask & np.isfinite(values).all(0)])
    together = np.concatenate(found, axis=1)
    if not together.shape[1]:
        return None
    return split(*together, first=first, second=second, tolerance=tolerance)
