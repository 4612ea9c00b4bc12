"""Scores that are right, but stand at another token: shifted, rolled, or in another chunk order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.chance import log_choose, log_match_chance, normal_ranks
from layerbisect.bisect.shapes.gaps import RAISED, chance
from layerbisect.bisect.shapes.sample import PairSample

Array = NDArray[np.float64]

# tokens that a match must have, and lags that are tried whatever the length
_TOKENS = 12
_LAGS = 8
# nat: mean absolute difference from which a response is looked at
BAD = 0.05
# a match leaves so much of a token's gap at most, for so many tokens at least
CLOSE = 0.25
SHARE = 0.85
# what explains so few of the responses that disagree is chance among many
RARE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """One response's scores by both columns, float64 [response]; nan where not compared."""

    call: int
    first: Array
    second: Array

    @property
    def gap(self) -> float:
        """Mean absolute difference (nat)."""
        return float(np.nanmean(np.abs(self.first - self.second)))


def responses(sample: PairSample) -> list[Scores]:
    """The responses with active tokens, in their order."""
    ends = np.cumsum(sample.lengths)
    first = np.where(sample.active, sample.first, np.nan)
    second = np.where(sample.active, sample.second, np.nan)
    parts = [
        (call, slice(int(end - length), int(end)))
        for call, (end, length) in enumerate(zip(ends, sample.lengths, strict=True))
    ]
    return [Scores(c, first[s], second[s]) for c, s in parts if sample.active[s].any()]


def is_close(left: Array, right: Array, gap: float) -> bool:
    """Say whether most of ``left`` is much nearer to ``right`` than ``gap`` (nat)."""
    both = np.isfinite(left) & np.isfinite(right)
    if int(both.sum()) < _TOKENS:
        return False
    apart = left[both] - right[both]
    apart = np.abs(apart - np.median(apart))
    return bool(np.mean(apart <= CLOSE * gap) >= SHARE)


@dataclass(frozen=True, slots=True)
class _Match:
    call: int
    lag: int
    log_chance: float
    left: float
    gap: float
    tokens: int
    wraps: bool | None


def shift(sample: PairSample) -> Finding | None:
    """Find scores that stand a fixed number of tokens off, in all responses or in some.

    In each response, the lag where ranks correlate best is tried; responses vote.
    """
    every = responses(sample)
    found = [m for r in every if r.gap > BAD and (m := _best_lag(r)) is not None]
    if not found:
        return None
    lag = Counter(m.lag for m in found).most_common(1)[0][0]
    agreeing = [m for m in found if m.lag == lag]
    log = sum(m.log_chance for m in agreeing) + log_choose(len(every), len(agreeing))
    bad = sum(r.gap > BAD for r in every)
    if log > RAISED or len(agreeing) < max(0.5 * len(found), RARE * bad):
        return None
    tokens = sum(m.tokens for m in agreeing)
    gap, left = (
        sum(v * m.tokens for m, v in zip(agreeing, values, strict=True)) / tokens
        for values in ([m.gap for m in agreeing], [m.left for m in agreeing])
    )
    total = float(np.abs(sample.difference).sum())
    known = [m.wraps for m in agreeing if m.wraps is not None]
    rolled = bool(known) and np.mean(known) > 0.5
    first, second = sample.first_name, sample.second_name
    return Finding(
        test="shift",
        pair=sample.name,
        side=None,
        summary=f"{first} at token i is {second} at token i{lag:+d}"
        + (", rolled around the response's ends" if rolled else ""),
        evidence=(
            f"shifted by {lag:+d}, {tokens} tokens are {left:.4f} nat apart; as they are recorded "
            f"{gap:.4f} nat",
            f"{len(agreeing)} of {len(every)} responses have this lag as their best, and "
            f"{len(found) - len(agreeing)} another",
        ),
        false_alarm=chance(log),
        explains=max(0.0, (gap - left) * tokens / total),
        tokens=tokens,
        mae=gap,
        where="" if len(agreeing) == len(every) else listed(sample, [m.call for m in agreeing]),
    )


def listed(sample: PairSample, calls: Sequence[int]) -> str:
    """Name responses, such as ``responses s3, s5``, or the first eight of many."""
    shown = ", ".join(sample.names[call] for call in calls[:8])
    more = f" and {len(calls) - 8} more" if len(calls) > 8 else ""
    return f"response{'s' if len(calls) > 1 else ''} {shown}{more}"


def _best_lag(scores: Scores) -> _Match | None:
    length = len(scores.first)
    widest = min(max(_LAGS, length // 4), length - _TOKENS)
    if widest < 1:
        return None
    size = 1 << (2 * length - 1).bit_length()
    one, two = (np.fft.rfft(normal_ranks(v), size) for v in (scores.first, scores.second))
    lags = np.r_[-widest:0, 1 : widest + 1]
    lag = int(lags[np.argmax(np.fft.irfft(np.conj(one) * two, size)[lags] / (length - abs(lags)))])
    here = slice(max(0, -lag), length - max(0, lag))
    there = slice(max(0, lag), length + min(0, lag))
    left, right, own = scores.first[here], scores.second[there], scores.second[here]
    gap = float(np.nanmean(np.abs(left - own))) if np.isfinite(left - own).any() else 0.0
    if gap <= BAD or not is_close(left, right, gap) or is_close(left, own, gap):
        return None
    log = log_match_chance(left, right, own) + math.log(len(lags))
    apart = np.abs(left - right)
    # what stands at the end that the shift leaves over
    ends = np.abs(np.roll(scores.second, -lag) - scores.first)
    ends = ends[length - lag :] if lag > 0 else ends[:-lag]
    wraps = bool(np.nanmedian(ends) <= CLOSE * gap) if np.isfinite(ends).any() else None
    return _Match(
        scores.call,
        lag,
        min(0.0, log),
        float(np.nanmean(apart)),
        gap,
        int(np.isfinite(apart).sum()),
        wraps,
    )
