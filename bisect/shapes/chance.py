"""How likely chance alone makes what a test for shapes saw: tails of distributions, as logarithms.

Natural logarithms, since the chances are far below what a float holds. All are upper bounds where
that is said, so that counting tries (adding the logarithm of their number) keeps them honest.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# tokens of a response are correlated: of so many, one counts in a correlation's chance
EVERY = 4


def log_normal_tail(z: float) -> float:
    """Log of the chance that a standard normal is above ``z``."""
    if z < 30.0:
        return math.log(max(math.erfc(z / math.sqrt(2.0)) / 2.0, 1e-300))
    # first term of the asymptotic series, an upper bound
    return -z * z / 2.0 - math.log(z * math.sqrt(2.0 * math.pi))


def log_gamma_tail(count: int, total: float) -> float:
    """Log of the chance that ``count`` independent exponentials of mean 1 sum to ``total``.

    With each the negative log of a uniform, this is Fisher's combination of their chances.
    """
    if total <= 0.0:
        return 0.0
    terms = np.arange(count)
    logs = terms * math.log(total) - np.array([math.lgamma(k + 1.0) for k in terms])
    top = float(logs.max())
    return min(0.0, top + math.log(float(np.exp(logs - top).sum())) - total)


def log_gamma_bound(count: int, total: float) -> float:
    """Chernoff's upper bound of the same, which holds for draws without replacement as well.

    W. Hoeffding, Probability inequalities for sums of bounded random variables (1963), theorem 4.
    """
    if total <= count:
        return 0.0
    return count - total + count * math.log(total / count)


def log_choose(total: int, chosen: int) -> float:
    """Log of the number of ways to choose ``chosen`` of ``total``."""
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)


def log_correlation_tail(correlation: float, tokens: float) -> float:
    """Log of the chance that unrelated values correlate as much, by Fisher's transformation.

    Every fourth of ``tokens`` counts.
    """
    free = tokens / EVERY - 3.0
    if free <= 0.0 or correlation <= 0.0:
        return 0.0
    return log_normal_tail(math.atanh(min(correlation, 1.0 - 1e-9)) * math.sqrt(free))


def normal_ranks(values: Array) -> Array:
    """Ranks of ``values`` along the last axis, centred and of mean square 1; ties by their order.

    Values that aren't finite get 0 and take no rank.
    """
    finite = np.isfinite(values)
    count = int(finite.sum())
    out = np.zeros_like(values)
    if count < 2:
        return out
    order = np.argsort(values[finite], kind="stable")
    ranks = np.empty(count)
    ranks[order] = np.arange(count) - (count - 1) / 2.0
    out[finite] = ranks / math.sqrt((count**2 - 1) / 12.0)
    return out


def log_match_chance(left: Array, right: Array, own: Array) -> float:
    """Log of the chance that ``left`` follows ``right`` by chance, ``own`` being its own partner.

    The partial rank correlation of ``left`` and ``right`` given ``own``: what they share through
    ``own``, as neighbours in a text do, doesn't count. All float64 [token].
    """
    both = np.isfinite(left) & np.isfinite(right) & np.isfinite(own)
    if int(both.sum()) < 2 * EVERY:
        return 0.0
    one, two, three = (normal_ranks(values[both]) for values in (left, right, own))
    r_right, r_own, r_between = (
        float(np.mean(a * b)) for a, b in ((one, two), (one, three), (two, three))
    )
    rest = (1.0 - r_own**2) * (1.0 - r_between**2)
    if rest <= 1e-12:
        return 0.0
    return log_correlation_tail((r_right - r_own * r_between) / math.sqrt(rest), float(both.sum()))
