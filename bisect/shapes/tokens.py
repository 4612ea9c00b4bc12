"""A sample's active tokens, and how far the mean over correlated tokens may stray by chance.

Tokens of one response are not independent: a response may be off as a whole, and neighbours move
together. So means are tested by responses, or by runs of ``RUN`` tokens where there are few.
Chances are upper bounds in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.shapes.sample import PairSample

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

RUN = 16
"""Tokens of a response whose differences count as one draw."""

ENOUGH = 6
"""Responses from which on their own spread says how sure a mean is."""

CORRELATED = 1.5
"""Spread of responses over that of independent runs from which on responses are what counts."""

FOLLOWS = 0.85
"""Correlation of both columns below which they are scores of other tokens, or of other weights."""

FEWEST = 32
"""Tokens below which no shape is looked for."""

BIAS = 0.003
"""A common bias (nat) that two sound engines may have."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The active tokens of a sample, all arrays [token]; scores float64 (nat), the rest int64.

    ``call`` and ``index`` are those of PairSample, ``run`` numbers the runs of ``RUN`` tokens over
    all responses, and ``left`` counts the response's tokens behind this one. ``entropy`` (nat) is
    nan where unknown.
    """

    first: Array
    second: Array
    call: NDArray[np.int64]
    run: NDArray[np.int64]
    index: NDArray[np.int64]
    left: NDArray[np.int64]
    token: NDArray[np.int64]
    entropy: Array

    @classmethod
    def of(cls, sample: PairSample) -> Tokens | None:
        """The active tokens; None where they are few or differ nowhere."""
        on = sample.active
        if on.sum() < FEWEST or not (sample.first[on] != sample.second[on]).any():
            return None
        call, index = sample.call[on], sample.index[on]
        runs = int(sample.lengths.max()) // RUN + 1
        entropy = sample.entropy
        return cls(
            first=sample.first[on],
            second=sample.second[on],
            call=call,
            run=np.unique(call * runs + index // RUN, return_inverse=True)[1],
            index=index,
            left=sample.lengths[call] - 1 - index,
            token=sample.token[on],
            entropy=np.full(len(call), np.nan) if entropy is None else entropy[on],
        )

    def __len__(self) -> int:
        return len(self.first)

    @property
    def difference(self) -> Array:
        """First minus second (nat)."""
        return self.first - self.second

    @property
    def mean(self) -> Array:
        """Mean of first and second (nat)."""
        return (self.first + self.second) / 2

    def where(self, kept: Flags) -> Tokens:
        """Those of these tokens that ``kept``, bool [token], says."""
        return Tokens(*(getattr(self, field.name)[kept] for field in fields(self)))


def letter(column: str) -> str | None:
    """The column's letter; None for one that is none of A, B and C."""
    return column[0] if column[0] in "ABC" else None


def mae(difference: Array) -> float:
    """Mean absolute difference, 0 of nothing."""
    return float(np.abs(difference).mean()) if len(difference) else 0.0


def explained(before: Array, after: Array) -> float:
    """Share of the absolute gap that is gone, 0 to 1."""
    return max(0.0, 1.0 - mae(after) / max(mae(before), 1e-300))


def weighted_median(values: Array, weights: Array) -> float:
    """The value with half of the weight on either side."""
    order = np.argsort(values)
    weight = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(weight, weight[-1] / 2)])


def relative(tokens: Tokens) -> tuple[Array, Array]:
    """Each token's difference over the sum of both sizes, negated, and that sum (nat).

    With log-probs of which first is f times second that is (f - 1) / (f + 1), without a pole.
    """
    size = np.maximum(np.abs(tokens.first) + np.abs(tokens.second), 1e-12)
    return -tokens.difference / size, size


def together(tokens: Tokens) -> bool:
    """Say whether both columns are scores of the same tokens at all, by their correlation."""
    held = np.maximum(np.stack([tokens.first, tokens.second]), -30.0)
    return bool(held.std(1).min() > 0 and np.corrcoef(held)[0, 1] > FOLLOWS)


def spread_of_sum(parts: Array, tokens: Tokens) -> tuple[float, float]:
    """Standard error of the sum of ``parts`` [token], whose mean is 0, and its degrees of freedom.

    The larger one of what the sums over responses and the sums over runs say. Degrees of freedom
    are the responses', unless they are few, or spread no more than independent runs make them.
    """
    errors, freedoms = [], []
    for cluster in (tokens.call, tokens.run):
        count = len(np.unique(cluster))
        if count > 1:
            sums = np.bincount(cluster, parts)
            errors.append(math.sqrt(float((sums**2).sum()) * count / (count - 1)))
            freedoms.append(count - 1.0)
    if not errors:
        return math.inf, 1.0
    by_response = freedoms[0] >= ENOUGH - 1 and errors[0] > CORRELATED * errors[-1]
    return max(errors), freedoms[0] if by_response else min(freedoms[-1], 30.0)


def chance_of_mean(
    values: Array, tokens: Tokens, allowed: float, weights: Array | None = None
) -> float:
    """Chance that a mean is so far beyond ``allowed`` where the true one is within it."""
    weight = np.ones(len(values)) if weights is None else weights
    total = float(weight.sum())
    mean = float((weight * values).sum()) / total
    error, freedom = spread_of_sum(weight * (values - mean), tokens)
    return t_tail((abs(mean) - allowed) * total / max(error, 1e-300), freedom)


def chance_of_signs(signs: Array, tokens: Tokens) -> float:
    """Chance that so many of ``signs``, 1 or -1, are 1 where they are even in each run.

    With all of them 1, one coin for each run.
    """
    runs = len(np.unique(tokens.run))
    return max(chance_of_mean(signs, tokens, 0.2), 2 * binomial_tail(runs, runs, 0.5))


def t_tail(t: float, freedom: float) -> float:
    """Upper bound of the chance that Student's t is beyond ``t`` on either side.

    The density at x is c (1 + x^2/f)^(-(f+1)/2); for x > t it is below x/t times itself, which
    integrates in closed form where f > 1. With f = 1 it is below c f/x^2.
    """
    if not t > 0:
        return 1.0
    log = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    log += math.log(2 / t) - math.log(freedom * math.pi) / 2
    if freedom <= 1:
        return min(1.0, math.exp(log) * freedom)
    log += math.log(freedom / (freedom - 1)) - (freedom - 1) / 2 * math.log1p(t * t / freedom)
    return math.exp(min(0.0, log))


def binomial_tail(hits: int, tries: int, chance: float) -> float:
    """Upper bound of the chance of ``hits`` or more in ``tries`` (Chernoff's)."""
    if hits <= chance * tries:
        return 1.0
    share = hits / tries
    exponent = share * math.log(share / chance)
    if share < 1:
        exponent += (1 - share) * math.log((1 - share) / (1 - chance))
    return math.exp(-tries * exponent)
