"""Array that are another function of the right ones: divided log-probs, losses, bits, sums."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.tokens import (
    Array,
    Flags,
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

FOLLOWED = 0.2
"""The same of a gap in proportion to the entropy, which few kept tokens make in part."""

CLIPPED = 30.0
"""Difference (nat) beyond which a token counts as this, so that none makes a mean alone."""

POSITIVE = 1e-3
"""No log-prob is above 0; what rounding adds is far below this (nat)."""

LONE = 3
"""So many tokens of probability 1 are no accident."""

DRIFT = 0.005
"""Relative difference of two engines' scores that rounding may give as a trend."""


def divided(sample: PairSample) -> Finding | None:
    """Find log-probs that were divided by a temperature after the softmax."""
    tokens = Tokens.of(sample)
    if tokens is None or scaled(tokens) is not None:
        return None
    found = factor(tokens)
    if found is None:
        return _divided_beside_scaled(sample, tokens)
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


def _divided_beside_scaled(sample: PairSample, tokens: Tokens) -> Finding | None:
    """A log-prob over T beside the one of logits over T: apart by the normalizer, so by context.

    With q the distribution at T the difference is -(1/T - 1) H_T(q), H_T the Renyi entropy of
    order T, near the entropy for T near 1.
    """
    found = in_proportion(tokens)
    if found is None:
        return None
    rate, chance = found
    lower, higher = sample.first_name, sample.second_name
    if rate > 0:
        # a temperature above 1, if not the other way round
        lower, higher = (lower, higher) if sample.entropy_of == higher else (higher, lower)
    temperature = 1 / (1 - rate) if lower == sample.first_name else 1 / (1 + rate)
    rest = tokens.difference - rate * tokens.entropy
    return Finding(
        test="log-probs divided by T",
        pair=sample.name,
        side=None,
        summary=f"{lower} is a log-prob divided by about {temperature:.2f}, where {higher} is of "
        "logits divided by as much: a temperature after the softmax misses the normalizer",
        evidence=(
            f"the difference is {rate:+.4f} times the entropy of {sample.entropy_of}, whatever the "
            "token's score",
            f"with that taken out {mae(tokens.difference):.6f} nat become {mae(rest):.6f}",
        ),
        false_alarm=chance,
        explains=explained(tokens.difference, rest),
        tokens=len(tokens),
        mae=mae(tokens.difference),
    )


def in_proportion(tokens: Tokens) -> tuple[float, float] | None:
    """Difference over entropy where that ratio makes the gap, and its chance; None elsewhere."""
    entropy = tokens.entropy
    if not np.isfinite(entropy).all() or not (entropy > 0.05).any():
        return None
    weight = np.maximum(entropy, 0.0)
    ratio = tokens.difference / np.maximum(entropy, 1e-12)
    rate = weighted_median(ratio, weight)
    left = mae(tokens.difference - rate * entropy)
    most = min(mae(tokens.difference), 2 * _deviation(tokens.difference))
    if abs(rate) < 4 * DRIFT or left > FOLLOWED * most or alone(tokens).sum() >= LONE:
        return None
    spread = 5 * weighted_median(np.abs(ratio - rate), weight)
    held = np.clip(ratio, rate - spread, rate + spread)
    return rate, chance_of_mean(held, tokens, DRIFT, weight)


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
    # unrelated scores of other sizes have a ratio, too, but don't follow each other
    following = min(_deviation(tokens.first), ratio * _deviation(tokens.second))
    most = min(mae(tokens.difference), following)
    if abs(math.log(ratio)) < 4 * DRIFT or mae(rest) > REMAINS * most:
        return None
    if mae(rest) >= _deviation(tokens.difference):
        return None
    spread = 5 * float(np.median(np.abs(share - middle)))
    held = np.clip(share, middle - spread, middle + spread)
    return ratio, chance_of_mean(held, tokens, DRIFT / 2)


def alone(tokens: Tokens) -> Flags:
    """Tokens of probability 1 in one column and clearly less in the other, bool [token].

    A filter that leaves one token alone makes them, and fill of zeros does; a factor doesn't.
    """
    high, low = np.maximum(tokens.first, tokens.second), np.minimum(tokens.first, tokens.second)
    return (high > -1e-6) & (low < -0.03)


def _deviation(values: Array) -> float:
    """Mean absolute deviation from the median."""
    return mae(values - float(np.median(values)))


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
            if "losses" in what or "probabilities" in what:
                if (odd < -POSITIVE).any():
                    continue
            rest = odd - scale(good)
            if not _nearer_by_far(rest, tokens.difference):
                continue
            if "base" in what:
                ratio = factor(tokens)
                told = math.log(2) if "-2" in what else math.log(10)
                if ratio is None or abs(told * ratio[0] ** (1 if first_is_odd else -1) - 1) > 0.003:
                    continue
            left = mae(np.clip(rest, -CLIPPED, CLIPPED))
            if best is None or left < best[0]:
                best = (left, first_is_odd, what, rest)
    if best is None:
        return None
    _, first_is_odd, what, rest = best
    # each token says whether the scale takes it nearer: a coin where it means nothing
    nearer = np.where(np.abs(rest) < np.abs(tokens.difference), 1.0, -1.0)
    chance = 2 * len(scales) * chance_of_mean(nearer, tokens, 0.5)
    return first_is_odd, what, rest, min(1.0, chance)


def _nearer_by_far(rest: Array, difference: Array) -> bool:
    """Say whether a scale takes a tenth or less of the gap to be left, and so on most tokens."""
    left, gap = (mae(np.clip(values, -CLIPPED, CLIPPED)) for values in (rest, difference))
    apart = np.abs(difference) > gap / 2
    most = (np.abs(rest[apart]) < 0.5 * np.abs(difference[apart])).mean() > 0.9
    return left <= 0.1 * gap and bool(most)


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
