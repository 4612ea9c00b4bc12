"""The first token of each response, which comes from prefill, against the others, from decode."""

from __future__ import annotations

import math

import numpy as np

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.chance import log_gamma_bound
from layerbisect.bisect.shapes.gaps import (
    ALLOWED,
    FLOOR,
    NATURAL,
    RAISED,
    Array,
    Bools,
    Gaps,
    Ints,
    by_call,
    chance,
    explained,
)
from layerbisect.bisect.shapes.sample import PairSample

# share of first tokens that must stand apart
_MOST = 0.75
# a mean so large a part of the mean absolute difference is no rounding
_ONE_SIGN = 0.5
# nat: decode without a fault, whose first token is prefill's to the bit, isn't further apart
_DECODE = 0.15


def first_token_only(sample: PairSample) -> Finding | None:
    """Find a gap at response position 0 alone."""
    whole = Gaps.of(sample)
    if whole is None:
        return None
    views = whole.views()
    return next((f for kept in views if (f := _first_alone(sample, whole, kept))), None)


def _first_alone(sample: PairSample, whole: Gaps, kept: Bools) -> Finding | None:
    gaps = whole.only(kept)
    every, first = whole.index == 0, gaps.index == 0
    if not first.any() or first.all() or not whole.all_moved(kept, every):
        return None
    own, others = _leveled(gaps, first)
    at_least = len(others) - np.searchsorted(np.sort(others), own / ALLOWED)
    log = _log_chance(at_least, len(others), gaps.context[first]) + math.log(2.0)
    usual = float(np.median(gaps.relative[~first]))
    high = float(np.mean(gaps.relative[first] > ALLOWED * usual))
    if log > RAISED or high < _MOST:
        return None
    # a gap that fades over the first few tokens is another
    next_few = gaps.relative[(gaps.index > 0) & (gaps.index <= 3)]
    here, rest = (float(np.abs(whole.d[part]).mean()) for part in (every, ~every))
    if (len(next_few) and np.median(next_few) > ALLOWED * usual) or rest > NATURAL:
        return None
    return Finding(
        test="first token only",
        pair=sample.name,
        side=None,
        summary=f"the first response token is {here:.4f} nat apart (mean difference "
        f"{whole.d[every].mean():+.4f}), later ones {rest:.4f}",
        evidence=(
            f"{round(high * first.sum())} of {first.sum()} first tokens that tell are more than "
            f"{ALLOWED:g} times as far apart as others with about the same score",
            f"they follow {len(np.unique(gaps.context[first]))} prompts, and count once for each",
        ),
        false_alarm=chance(log),
        explains=explained(whole, every),
        tokens=int(every.sum()),
        mae=here,
        where="response position 0",
    )


def all_but_first_token(sample: PairSample) -> Finding | None:
    """Find a gap at all response positions but 0.

    Decode differs from prefill by rounding, so the gap must be larger than rounding or of one sign.
    """
    whole = Gaps.of(sample)
    if whole is None:
        return None
    gaps = whole.only(whole.unsure)
    first = gaps.index == 0
    if not first.any() or first.all():
        return None
    every, rest = whole.index == 0, gaps.d[~first]
    mae, size = (float(np.abs(d).mean()) for d in (whole.d[~every], rest))
    if mae <= FLOOR or (mae < _DECODE and abs(float(np.median(rest))) < _ONE_SIGN * size):
        return None
    # what begins later is another test's
    next_few = np.abs(gaps.d[(gaps.index > 0) & (gaps.index <= 3)])
    if not len(next_few) or np.median(next_few) < 0.5 * np.median(np.abs(rest)):
        return None
    here, contexts = float(np.abs(gaps.d[first]).mean()), gaps.context[first]
    # the first is less apart by more than noise differs, or lacks an offset that the others have
    own, others = _leveled(gaps, first)
    at_most = np.searchsorted(np.sort(others), ALLOWED * own, side="right")
    log = _log_chance(at_most, len(others), contexts) if here <= 0.5 * size else 0.0
    middle = float(np.median(rest))
    if abs(middle) >= max(_ONE_SIGN * size, 10 * FLOOR):
        own, others = (math.copysign(1.0, middle) * part for part in (gaps.d[first], rest))
        at_most = np.searchsorted(np.sort(others), own, side="right")
        if np.median(own) <= 0.5 * abs(middle):
            log = min(log, _log_chance(at_most, len(others), contexts))
    log += math.log(2.0)
    low = float(np.mean(own < np.median(others)))
    if log > RAISED or low < _MOST:
        return None
    return Finding(
        test="all but the first token",
        pair=sample.name,
        side=None,
        summary=f"response tokens from position 1 on are {mae:.4f} nat apart (mean difference "
        f"{whole.d[~every].mean():+.4f}), the first {np.abs(whole.d[every]).mean():.4f}",
        evidence=(
            f"{low:.0%} of {first.sum()} unsure first tokens are less apart than half of the later "
            "ones",
            f"they follow {len(np.unique(contexts))} prompts, and count once for each",
        ),
        false_alarm=chance(log),
        explains=explained(whole, ~every),
        tokens=int((~every).sum()),
        mae=mae,
        where="response positions >= 1",
    )


def _leveled(gaps: Gaps, first: Bools) -> tuple[Array, Array]:
    """Gaps of first and of later tokens, relative to the median later one of their response."""
    leveled = gaps.relative.copy()
    for part in by_call(gaps.call):
        later = gaps.relative[part][~first[part]]
        leveled[part] /= np.median(later) if len(later) else 1.0
    return leveled[first], leveled[~first]


def _log_chance(beyond: Ints, others: int, contexts: Ints) -> float:
    """Log of the chance that first tokens rank so far out.

    Args:
        beyond: int64 [first token], how many of the later tokens are at least as far out.
        others: how many later tokens there are.
        contexts: int64 [first token]. Samples of one prompt share what rounding made of it, and
            count once, by their mean: no sum of dependent terms is wider than that of equal ones.
    """
    surprises = -np.log((beyond + 1) / (others + 1))
    _, number = np.unique(contexts, return_inverse=True)
    means = np.bincount(number, weights=surprises) / np.bincount(number)
    return log_gamma_bound(len(means), float(means.sum()))
