"""Which choice of experts rounding explains: near ties, by logits that are shown or hidden."""

from __future__ import annotations

import torch

from layerbisect.kernels.judging.residuals import ONE_ROUNDING, unit_roundoff

TIE_MARGIN = 8.0
"""A route whose margin is below this many deviations of the router's noise may flip."""
VANISHED = 87.0
"""Further below the largest logit, a softmax score in float32 is no normal number any more, and may
be taken for 0: exp(-87.3) is the smallest."""


def rounding_of_choice(
    logits: torch.Tensor, chosen: torch.Tensor, left: torch.Tensor
) -> torch.Tensor:
    """By how much an expert that was left out may be ahead in a side's own logits: [row].

    ``chosen`` and ``left`` [row] are the logits of the worst expert chosen and the best left out. A
    choice is made of the logits themselves, of wider ones that the logits were rounded from, or of
    softmax scores rounded to their dtype. One rounding of both logits changes their difference by
    no more than ``u (|a| + |b|)``, one of both scores their ratio by ``2 u``, and scores in float32
    cannot tell apart what differs by less than a few roundoffs of the exponent, nor anything that
    is so far below the largest logit that its score is 0. These are bounds, not deviations: no
    correct choice is beyond them, in however many rows.
    """
    unit, single = unit_roundoff(_held_in(logits)), unit_roundoff("float32")
    rounded = torch.maximum(unit * (chosen.abs() + left.abs()), chosen.new_tensor(2 * unit))
    exponent = (logits.amax(1) - chosen).abs()
    vanished = logits.amax(1) - left > VANISHED
    return torch.where(vanished, torch.inf, rounded + 4 * single * (1 + exponent))


def _held_in(logits: torch.Tensor) -> str:
    """Name the narrowest dtype that holds the logits to the bit, as the engine had them."""
    logits = logits[logits.isfinite().all(1)]
    for dtype in ("bfloat16", "float16"):
        if torch.equal(logits.to(getattr(torch, dtype)).to(logits.dtype), logits):
            return dtype
    return "float32"


def logits_noise(exact: torch.Tensor, low: torch.Tensor, dtype: str) -> float:
    """Standard deviation of rounding in logits [row, expert]: one rounding of them at least.

    ``exact`` and ``low`` are those of the exact and of the low-precision reference.
    """
    whole = (exact.isfinite() & low.isfinite()).all(1)
    least = one_rounding(exact[whole], dtype)
    return max(float((low - exact)[whole].square().mean().sqrt()), least)


def one_rounding(logits: torch.Tensor, dtype: str) -> float:
    """Root mean square error of rounding ``logits`` [row, expert] once to ``dtype``."""
    return ONE_ROUNDING * unit_roundoff(dtype) * float(logits.square().mean().sqrt())
