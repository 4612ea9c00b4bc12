"""Array that are another function of the right ones: divided log-probs, losses, bits, sums."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from layerbisect.bisect.score_report import Finding
from layerbisect.bisect.score_sample import PairSample
from layerbisect.bisect.score_tokens import (
    Array,
    Tokens,
    chance_of_mean,
    explained,
    letter,
    mae,
    relative,
    weighted_median,
)

REMAINS = 0.25
"""Share of the gap that may remain where another scale is said to explain it."""

POSITIVE = 1e-3
"""No log-prob is above 0; what rounding adds is far below this (nat)."""

DRIFT = 0.005
"""Relative difference of two engines' scores that rounding may give as a trend."""


def divided(sample: PairSample) -> Finding | None:
    """Find log-probs that were divided by a temperature after the softmax."""
    tokens = Tokens.of(sample)
    if tokens is None or scaled(tokens) is not None:
        return None
    found = factor(tokens)
    if found is None:
        return None
    ratio, chance = found
    names = (sample.first_name, sample.second_name)
    # below 1 is what a temperature mostly is: the larger scores are the divided ones
    larger, smaller = names if ratio > 1 else names[::-1]
    temperature = min(ratio, 1 / ratio)
    rest = _rest(tokens, ratio)
    return Finding(
        test="log-probs divided by T",
        pair=sample.name,
        side=None,
        summary=f"{larger} is {smaller} divided by {temperature:.3f} (or {smaller} is {larger} "
        f"divided by {1 / temperature:.3f}): a temperature after the softmax, where the "
        "normalizer misses it",
        evidence=(
            f"{sample.first_name} / {sample.second_name} is {ratio:.4f} for all tokens alike",
            f"through the origin it leaves {mae(rest):.6f} of {mae(tokens.difference):.6f} nat",
        ),
        false_alarm=chance,
        explains=explained(tokens.difference, rest),
        tokens=len(tokens),
        mae=mae(tokens.difference),
    )


def factor(tokens: Tokens) -> tuple[float, float] | None:
    """First over second where one factor makes the gap, and its chance; None elsewhere.

    Tokens near 0 say nothing of a factor, so each counts by its size.
    """
    share, size = relative(tokens)
    middle = weighted_median(share, size)
    if abs(middle) >= 0.9:
        return None
    ratio = (1 + middle) / (1 - middle)
    rest = _rest(tokens, ratio)
    if abs(math.log(ratio)) < 4 * DRIFT or mae(rest) > REMAINS * mae(tokens.difference):
        return None
    if mae(rest) >= mae(tokens.difference - float(np.median(tokens.difference))):
        return None
    spread = 5 * float(np.median(np.abs(share - middle)))
    held = np.clip(share, middle - spread, middle + spread)
    return ratio, chance_of_mean(held, tokens, DRIFT / 2)


def _rest(tokens: Tokens, ratio: float) -> Array:
    return tokens.first - ratio * tokens.second


def other_scale(sample: PairSample) -> Finding | None:
    """Find scores that are no natural log-probs: losses, bits, probabilities, running sums."""
    tokens = Tokens.of(sample)
    found = None if tokens is None else scaled(tokens)
    if tokens is None or found is None:
        return None
    first_is_odd, what, rest, chance = found
    odd, good = (sample.first_name, sample.second_name)[:: 1 if first_is_odd else -1]
    return Finding(
        test="scores of another scale",
        pair=sample.name,
        side=letter(odd),
        summary=f"{odd} {what} of {good}",
        evidence=(f"taken so, {mae(tokens.difference):.6f} nat become {mae(rest):.6f}",),
        false_alarm=chance,
        explains=explained(tokens.difference, rest),
        tokens=len(tokens),
        mae=mae(tokens.difference),
    )


def scaled(tokens: Tokens) -> tuple[bool, str, Array, float] | None:
    """Whether first is the odd one, what it holds, what is left of the gap, and the chance."""
    first = np.concatenate([[True], np.diff(tokens.call) != 0])

    def summed(score: Array) -> Array:
        total = np.cumsum(score)
        before: Array = np.repeat((total - score)[first], np.bincount(np.cumsum(first) - 1))
        return total - before

    scales: dict[str, Callable[[Array], Array]] = {
        "holds losses: the negative": np.negative,
        "holds base-2 logarithms": lambda score: score / math.log(2),
        "holds base-10 logarithms": lambda score: score / math.log(10),
        "holds probabilities: the exponential": lambda score: np.exp(np.minimum(score, 0)),
        "holds running sums": summed,
    }
    best: tuple[float, bool, str, Array] | None = None
    for first_is_odd in (True, False):
        odd, good = (tokens.first, tokens.second)[:: 1 if first_is_odd else -1]
        for what, scale in scales.items():
            rest = odd - scale(good)
            if mae(rest) > 0.1 * mae(tokens.difference):
                continue
            if "base" in what:
                ratio = factor(tokens)
                told = math.log(2) if "-2" in what else math.log(10)
                if ratio is None or abs(told * ratio[0] ** (1 if first_is_odd else -1) - 1) > 0.003:
                    continue
            if best is None or mae(rest) < best[0]:
                best = (mae(rest), first_is_odd, what, rest)
    if best is None:
        return None
    _, first_is_odd, what, rest = best
    # each token says whether the scale takes it nearer: a coin where it means nothing
    nearer = np.where(np.abs(rest) < np.abs(tokens.difference), 1.0, -1.0)
    chance = 2 * len(scales) * chance_of_mean(nearer, tokens, 0.5)
    return first_is_odd, what, rest, min(1.0, chance)


def positive(sample: PairSample) -> Finding | None:
    """Find log-probs above 0, which no probability has."""
    tokens = Tokens.of(sample)
    if tokens is None or scaled(tokens) is not None:
        return None
    above = {
        sample.first_name: tokens.first > POSITIVE,
        sample.second_name: tokens.second > POSITIVE,
    }
    counts = {name: int(kept.sum()) for name, kept in above.items()}
    column = max(counts, key=lambda name: counts[name])
    if not counts[column]:
        return None
    kept = above[column]
    scores = tokens.first if column == sample.first_name else tokens.second
    return Finding(
        test="positive log-probs",
        pair=sample.name,
        side=letter(column),
        summary=f"{column} holds {counts[column]} scores above 0, up to {scores.max():+.6f}: "
        "no log-prob of a normalized distribution",
        evidence=(f"{counts[column]} of {len(tokens)} tokens above {POSITIVE} nat",),
        # rounding of a float32 log-softmax stays a hundred times below the threshold
        false_alarm=0.0,
        explains=explained(tokens.difference, np.where(kept, 0.0, tokens.difference)),
        tokens=counts[column],
        mae=mae(tokens.difference[kept]),
        where="scores above 0",
    )
