"""The first token of each response, which comes from prefill, against the others, from decode."""

from __future__ import annotations

import math

import numpy as np

from layerbisect.bisect.score_chance import log_gamma_tail
from layerbisect.bisect.score_gaps import (
    ALLOWED,
    FLOOR,
    NATURAL,
    RAISED,
    Array,
    Bools,
    Gaps,
    by_call,
    chance,
    explained,
    log_set_chance,
)
from layerbisect.bisect.score_report import Finding
from layerbisect.bisect.score_sample import PairSample

# share of first tokens that must stand apart
_MOST = 0.75
# a mean so large a part of the mean absolute difference is no rounding
_ONE_SIGN = 0.5
# nat: decode without a fault, whose first token is prefill's to the bit, isn't further apart
_DECODE = 0.15


def first_token_only(sample: PairSample) -> Finding | None:
    """Find a gap at response position 0 alone."""
    gaps = Gaps.of(sample)
    if gaps is None:
        return None
    first = gaps.index == 0
    if not first.any() or first.all():
        return None
    log = log_set_chance(gaps, first)
    usual = float(np.median(gaps.relative[~first]))
    high = float(np.mean(gaps.relative[first] > ALLOWED * usual))
    if log > RAISED or high < _MOST:
        return None
    # a gap that fades over the first few tokens is another
    next_few = gaps.relative[(gaps.index > 0) & (gaps.index <= 3)]
    here, rest = (float(np.abs(gaps.d[part]).mean()) for part in (first, ~first))
    if (len(next_few) and np.median(next_few) > ALLOWED * usual) or rest > NATURAL:
        return None
    return Finding(
        test="first token only",
        pair=sample.name,
        side=None,
        summary=f"the first response token is {here:.4f} nat apart (mean difference "
        f"{gaps.d[first].mean():+.4f}), later ones {rest:.4f}",
        evidence=(
            f"{round(high * first.sum())} of {first.sum()} first tokens are more than "
            f"{ALLOWED:g} times as far apart as others with about the same score",
        ),
        false_alarm=chance(log),
        explains=explained(gaps, first),
        tokens=int(first.sum()),
        mae=here,
        where="response position 0",
    )


def all_but_first_token(sample: PairSample) -> Finding | None:
    """Find a gap at all response positions but 0.

    Decode differs from prefill by rounding, so the gap must be larger than rounding or of one sign.
    """
    gaps = Gaps.of(sample)
    if gaps is None:
        return None
    first = gaps.index == 0
    rest = gaps.d[~first]
    if not first.any() or first.all():
        return None
    size, mean = float(np.abs(rest).mean()), float(rest.mean())
    if size <= FLOOR or (size < _DECODE and abs(float(np.median(rest))) < _ONE_SIGN * size):
        return None
    # what begins later is another test's
    next_few = np.abs(gaps.d[(gaps.index > 0) & (gaps.index <= 3)])
    if not len(next_few) or np.median(next_few) < 0.5 * np.median(np.abs(rest)):
        return None
    here = float(np.abs(gaps.d[first]).mean())
    # the first is less apart by more than noise differs, or lacks an offset that the others have
    offset = math.copysign(1.0, float(np.median(rest))) * gaps.d
    ways = [(gaps.relative, ALLOWED * gaps.relative)]
    if abs(float(np.median(rest))) >= max(_ONE_SIGN * size, 10 * FLOOR):
        ways.append((offset, offset))
    log, low = min(_lowest(gaps, first, values, own) for values, own in ways)
    log += math.log(len(ways))
    calls = int(first.sum())
    if log > RAISED or low < _MOST * calls or here > 0.5 * size:
        return None
    return Finding(
        test="all but the first token",
        pair=sample.name,
        side=None,
        summary=f"response tokens from position 1 on are {size:.4f} nat apart (mean difference "
        f"{mean:+.4f}), the first {here:.4f}",
        evidence=(
            f"{low} of {calls} first tokens are clearly less apart than half of their later ones",
        ),
        false_alarm=chance(log),
        explains=explained(gaps, ~first),
        tokens=len(rest),
        mae=size,
        where="response positions >= 1",
    )


def _lowest(gaps: Gaps, first: Bools, values: Array, own: Array) -> tuple[float, int]:
    """Log of the chance that first tokens are so low among ``values``, by ``own``; how many are.

    Below half of the later tokens of its response is low.
    """
    logs, low = 0.0, 0
    for part in by_call(gaps.call):
        if not first[part.start]:
            continue
        others = values[part][1:]
        below = int((others <= own[part.start]).sum())
        logs -= math.log((below + 1) / (len(others) + 1))
        low += below < 0.5 * len(others)
    return log_gamma_tail(int(first.sum()), logs), low
