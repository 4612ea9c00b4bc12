"""How far rounding moves a log-prob: that of the logits, and that of the long sums around them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from layerbisect.kernels.judging.residuals import ONE_ROUNDING, order_freedom, unit_roundoff

PARTIAL_SUMS = 8
"""Nobody adds up a vocabulary in fewer than the lanes of one vector register."""

# what is left of a near certain token's error, in unit roundoffs
_LEAST_NOISE = 0.1
_UNIT = unit_roundoff("float32")


def logprob_noise(
    tiles: Iterable[torch.Tensor],
    own_logit: torch.Tensor,
    exact: torch.Tensor,
    low: torch.Tensor,
    dtype: str,
    *,
    hidden: int = 0,
) -> torch.Tensor:
    """Standard deviation (nat) of rounding in each row's log-prob: float64 [row].

    ``tiles`` are the logits float64 [row, some of the vocabulary], ``own_logit`` [row] those of the
    scored tokens, ``exact`` and ``low`` [row] the log-probs by both references, and ``dtype`` what
    logits are rounded to. Each logit is a sum of ``hidden`` products, 0 where it was given. A
    log-prob moves by the error of its own logit, and by that of every logit times its probability
    in the other direction. Each logit is rounded at its own size, so rows differ. What the
    references show of it may be that of another order of summing; sums in float32 are added to it.
    """
    own = exact.exp()
    # its own logit counts 1 - p; below it counts p, as all others do
    extra = (1 - own).square() - own.square()
    spacings = extra * _spacing(own_logit, dtype).square()
    sums = _Sums(own_logit, exact)
    for logits in tiles:
        chance = (logits - sums.normalizer[:, None]).exp()
        spacings += (chance * _spacing(logits, dtype)).square().sum(1)
        sums.add(logits, chance)
    noise = (spacings.clamp_min(0.0) / 12).sqrt() + _LEAST_NOISE * unit_roundoff(dtype)
    # sums in float32 lose more than their last rounding
    noise = noise * ((low - exact) / noise).square().mean().sqrt().clamp_min(1.0)
    variance = sums.variance() + hidden * sums.products(extra)
    return ((noise * order_freedom(dtype)).square() + variance).sqrt()


class _Sums:
    """What float32 loses in a log-prob's own sum, and in the sums that its logits are.

    A sum of n terms that is added up one by one rounds each of its partial sums. These errors are
    independent, so that they add up like the root of n (Higham and Mary 2019, A New Approach to
    Probabilistic Rounding Error Analysis); but terms below half a step of the partial sum are lost
    whole, all in one direction.
    """

    def __init__(self, own_logit: torch.Tensor, exact: torch.Tensor) -> None:
        self.own_logit, self.exact = own_logit, exact
        self.normalizer = own_logit - exact
        self.peak = torch.full_like(exact, -torch.inf)
        self.terms = 0
        # shares of the sum that are lost, squared logits, and those times squared probabilities
        self.lost, self.squares = torch.zeros_like(exact), torch.zeros_like(exact)
        self.chances, self.weighed = torch.zeros_like(exact), torch.zeros_like(exact)

    def add(self, logits: torch.Tensor, chance: torch.Tensor) -> None:
        """Take in some of the vocabulary: [row, some] each."""
        self.terms += logits.shape[1]
        self.peak = self.peak.maximum(logits.amax(1))
        self.lost += chance.masked_fill(chance >= _UNIT / PARTIAL_SUMS, 0.0).sum(1)
        squared = chance.square()
        self.squares += logits.square().sum(1)
        self.chances += squared.sum(1)
        self.weighed += (squared * logits.square()).sum(1)

    def variance(self) -> torch.Tensor:
        """Variance (nat^2) of the normaliser's sum, and of the few steps around it: [row]."""
        # partial sums of positive terms grow evenly, to the whole one at most
        rounded = self.terms / PARTIAL_SUMS / 3 * (ONE_ROUNDING * _UNIT) ** 2
        # as much as all of it, or as nothing
        lost = self.lost.square() / 3
        # its logarithm, the distance from the maximum, the normaliser and the log-prob
        sizes = (
            self.normalizer - self.peak, self.own_logit - self.peak, self.normalizer, self.exact
        )  # fmt: skip
        steps = sum((_spacing(size, "float32").square() for size in sizes), start=self.lost * 0)
        # exponentials and the logarithm are good to an ulp
        return rounded + lost + steps / 12 + (2 * _UNIT) ** 2

    def products(self, extra: torch.Tensor) -> torch.Tensor:
        """Variance (nat^2) by term of the logits' sums, the own one's counted ``extra``: [row].

        Partial sums of products are as large as a logit of that row typically is, where a massive
        channel comes first, and grow to the logit's own size besides.
        """
        typical = self.squares / self.terms
        size = self.weighed + extra * self.own_logit.square()
        size = size / 3 + (self.chances + extra) * typical
        return size.clamp_min(0.0) * (ONE_ROUNDING * _UNIT) ** 2


def _spacing(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Distance between neighbouring numbers of ``dtype`` at the size of ``values``."""
    return torch.exp2(values.abs().clamp_min(1e-6).log2().floor()) * (2 * unit_roundoff(dtype))
