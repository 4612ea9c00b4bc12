"""How far rounding of the logits moves a log-prob."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from layerbisect.kernels.judging.residuals import unit_roundoff

# what is left of a near certain token's error, in unit roundoffs
_LEAST_NOISE = 0.1


def logprob_noise(
    tiles: Iterable[torch.Tensor],
    own_logit: torch.Tensor,
    exact: torch.Tensor,
    low: torch.Tensor,
    dtype: str,
) -> torch.Tensor:
    """Standard deviation (nat) of rounding in each row's log-prob: float64 [row].

    ``tiles`` are the logits float64 [row, some of the vocabulary], ``own_logit`` [row] those of the
    scored tokens, ``exact`` and ``low`` [row] the log-probs by both references, and ``dtype`` what
    logits are rounded to. A log-prob moves by the error of its own logit, and by that of every
    logit times its probability in the other direction. Each logit is rounded at its own size, so
    rows differ.
    """
    own = exact.exp()
    # its own logit counts 1 - p; below it counts p, as all others do
    variance = ((1 - own).square() - own.square()) * _spacing(own_logit, dtype).square()
    normalizer = own_logit - exact
    for logits in tiles:
        chance = (logits - normalizer[:, None]).exp()
        variance += (chance * _spacing(logits, dtype)).square().sum(1)
    noise = (variance.clamp_min(0.0) / 12).sqrt() + _LEAST_NOISE * unit_roundoff(dtype)
    # sums in float32 lose more than their last rounding
    return noise * ((low - exact) / noise).square().mean().sqrt().clamp_min(1.0)


def _spacing(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Distance between neighbouring numbers of ``dtype`` at the size of ``values``."""
    return torch.exp2(values.abs().clamp_min(1e-6).log2().floor()) * (2 * unit_roundoff(dtype))
