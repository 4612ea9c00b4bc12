"""What a gap does to a loss that divides the trainer's probabilities by the rollout's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import Effect
from layerbisect.captures.record.call import Call

# exp of it and its square are finite in float64
_LARGEST = 300.0


class EffectMeasure:
    """Gathers importance ratios exp(trainer - rollout), call by call."""

    def __init__(self, rollout: str, trainer: str, epsilon: float) -> None:
        """``epsilon`` is the loss's clipping range: ratios outside 1 - e to 1 + e are clipped."""
        self.rollout, self.trainer, self.epsilon = rollout, trainer, epsilon
        self._tokens = self._low = self._high = 0
        self._sum = self._squares = self._k1 = self._k3 = 0.0
        self._min, self._max = np.inf, -np.inf
        self._responses: list[float] = []

    def add(self, call: Call) -> None:
        """Take in a call."""
        rollout, trainer = call.scores[self.rollout], call.scores[self.trainer]
        used = call.mask & np.isfinite(rollout) & np.isfinite(trainer)
        if not used.any():
            return
        log_ratio = np.clip((trainer - rollout)[used], -_LARGEST, _LARGEST)
        ratio = np.exp(log_ratio)
        self._tokens += len(ratio)
        self._sum += float(ratio.sum())
        self._squares += float((ratio**2).sum())
        self._low += int((ratio < 1 - self.epsilon).sum())
        self._high += int((ratio > 1 + self.epsilon).sum())
        self._min = min(self._min, float(ratio.min()))
        self._max = max(self._max, float(ratio.max()))
        self._k1 -= float(log_ratio.sum())
        # expm1 keeps what r - 1 loses next to 1
        self._k3 += float((np.expm1(log_ratio) - log_ratio).sum())
        self._responses.append(float(log_ratio.sum()))

    def report(self) -> Effect | None:
        """Summarize; None where no token is scored by both."""
        n = self._tokens
        if not n:
            return None
        return Effect(
            rollout=self.rollout,
            trainer=self.trainer,
            tokens=n,
            epsilon=self.epsilon,
            ratio_mean=self._sum / n,
            ratio_min=self._min,
            ratio_max=self._max,
            clipped_low=self._low / n,
            clipped_high=self._high / n,
            effective_sample_size=self._sum**2 / (n * self._squares),
            effective_responses=_effective(np.array(self._responses)),
            k1=self._k1 / n,
            k3=self._k3 / n,
        )


def _effective(log_weights: NDArray[np.float64]) -> float:
    """(sum w)^2 / (n sum w^2) of weights given by their logarithms."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
