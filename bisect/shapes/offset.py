"""Scores that differ by one constant on all tokens, or on all from a response position on."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.tokens import (
    BIAS,
    FEWEST,
    Array,
    Tokens,
    chance_of_mean,
    explained,
    mae,
    relative,
    weighted_median,
)

LEAST = 0.005
SPREAD = 0.4
SAME_SIGN = 0.9


def constant_offset(sample: PairSample) -> Finding | None:
    """Find a constant (nat) by which one column is lower on all tokens from some position on."""
    tokens = Tokens.of(sample)
    if tokens is None:
        return None
    difference, weight = tokens.difference, _weight(tokens)
    tail = tokens.index >= np.quantile(tokens.index, 0.75)
    usual = [weighted_median(difference[on], weight[on]) for on in (tail | True, tail)]
    if max(map(abs, usual)) < LEAST:
        return None
    start, offset = _step(difference, tokens.index, weight)
    if abs(offset) < LEAST:
        return None
    on = tokens.index >= start
    kept, touched, weight = tokens.where(on), difference[on], weight[on]
    rest = touched - offset
    spread = weighted_median(np.abs(rest), weight)
    same = float((weight * (touched * np.sign(offset) > 0)).sum() / weight.sum())
    if len(kept) < FEWEST or spread > SPREAD * abs(offset) or same < SAME_SIGN:
        return None
    if _lopsided(touched / offset, weight) or _depends_on_score(kept, touched, offset, weight):
        return None
    held = offset + np.clip(rest, -5 * spread, 5 * spread)
    tries = 1 if start == 0 else int(tokens.index.max())
    chance = min(1.0, tries * chance_of_mean(held, kept, BIAS, weight))
    lower = sample.first_name if offset < 0 else sample.second_name
    other = sample.second_name if offset < 0 else sample.first_name
    evidence = [
        f"difference {offset:+.6f} nat in the median over {len(kept)} tokens, of which "
        f"{(touched * np.sign(offset) > 0).mean():.1%} have its sign",
        f"without it the median absolute difference is {np.median(np.abs(rest)):.6f} and the mean "
        f"{mae(rest):.6f}",
    ]
    if start:
        evidence.append(
            f"before position {start} the median absolute difference is "
            f"{np.median(np.abs(difference[~on])):.6f} over {int((~on).sum())} tokens"
        )
    return Finding(
        test="constant offset",
        pair=sample.name,
        side=None,
        summary=f"{lower} is lower than {other} by {abs(offset):.3f} nat"
        + (f" from response position {start} on" if start else " on all tokens"),
        evidence=tuple(evidence),
        false_alarm=chance,
        explains=explained(difference, difference - offset * on),
        tokens=len(kept),
        mae=mae(touched),
        where=f"response positions >= {start}" if start else "",
    )


def _weight(tokens: Tokens) -> Array:
    """Weights against noise, which is about in proportion to 1 - p and smallest for sure tokens."""
    sure = np.exp(np.minimum(np.maximum(tokens.first, tokens.second), 0.0))
    weight: Array = 1 / (0.1 + 1 - sure)
    return weight


def _step(difference: Array, index: NDArray[np.int64], weight: Array) -> tuple[int, float]:
    """The position from which on a constant explains most, and the constant: least absolute rest.

    Position 0 unless what stands before another one is clearly nearer to 0 than to the constant.
    """
    best = (np.inf, 0, 0.0)
    for share in (0.0, 0.25, 0.5, 0.75):
        start = int(np.quantile(index, share))
        for _ in range(3):
            on = index >= start
            offset = weighted_median(difference[on], weight[on])
            saved = weight * (np.abs(difference) - np.abs(difference - offset))
            start = int(np.argmin(np.r_[0.0, np.cumsum(np.bincount(index, saved))[:-1]]))
        rest = float((weight * np.abs(difference - offset * (index >= start))).sum())
        best = min(best, (rest, start, offset))
    _, start, offset = best
    before, heavy = difference[index < start], weight[index < start]
    if start and (heavy * np.abs(before)).sum() > 0.6 * (heavy * np.abs(before - offset)).sum():
        start, offset = 0, weighted_median(difference, weight)
    return start, offset


def _lopsided(scaled: Array, weight: Array) -> bool:
    """Say whether differences, in units of the constant, fall short far more than they exceed it.

    Noise is even; what is bounded, as by a filter's kept mass, is not.
    """
    short, beyond = (float((weight * far).sum()) for far in (scaled < 0.5, scaled > 1.5))
    return short > 2 * beyond + 0.05 * float(weight.sum())


def _depends_on_score(tokens: Tokens, difference: Array, offset: float, weight: Array) -> bool:
    """Say whether a factor on the scores does better, or unlikely tokens have another constant."""
    share, size = relative(tokens)
    middle = weighted_median(share, size)
    rest = weight * (tokens.difference + middle * size)
    if mae(rest) < mae(weight * (difference - offset)):
        return True
    score = tokens.mean
    unlikely = score <= np.median(score)
    least = difference[unlikely]
    spread = float(np.median(np.abs(least - np.median(least))))
    away = abs(float(np.median(least)) - offset)
    runs = len(np.unique(tokens.run[unlikely]))
    return away > 0.25 * abs(offset) + 3 * spread / math.sqrt(runs)
