"""Scores of logits over a temperature against raw ones.

With p the raw distribution and b = 1/T, the log-prob l of a token becomes b l - log sum_v p_v^b, so
the difference is exactly (b - 1) (l + H_b), with H_b the Renyi entropy of order b: a function of
the context alone, close to the entropy H. So within contexts of one entropy the slope on l is
b - 1, and on average a likely token gains where an unlikely one loses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.heated import outside
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.scale import factor, scaled
from layerbisect.bisect.shapes.tokens import Tokens, explained, mae, spread_of_sum, t_tail, together

Array = NDArray[np.float64]

LEAST = 0.02
"""Slope below which two sound engines may differ: noise that grows for unlikely tokens bends."""

STEEPEST = 1.2
"""Slope on the mean score that a temperature of 1/4 gives; nobody trains on colder samples."""

FITS = 0.4
"""Share of the squared difference (of typical tokens) that a temperature has to explain."""

SURE = 0.75
"""Share of the absolute gap that a temperature takes away where the entropies are known."""

NOISED = 0.4
"""The same where noise that is really there makes the rest."""

IMPOSSIBLE = 0.01
"""Share of the absolute gap that no temperature can make, whatever the entropies are."""

NOISY = 0.12
"""The same where noise that is really there makes it."""

OF_NOISE = 0.3
"""Share of the natural noise that may fall where no temperature can go."""

DOUBTFUL = 1e-3
"""Chance given where more than noise is left: an update of the weights can sharpen scores too, and
changes them in other ways as well."""

NEAR = 0.08
"""Relative distance from 1 within which nobody sets a temperature that is no multiple of ROUND."""

ROUND = 0.05
EXACT = 0.002


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    slope: float
    error: float
    chance: float
    share: float
    fitted: Array


def temperature(sample: PairSample) -> Finding | None:
    """Find scores of logits divided by a temperature, and fit it."""
    tokens = Tokens.of(sample)
    if tokens is None or factor(tokens) is not None or scaled(tokens) is not None:
        return None
    entropy = tokens.entropy
    known = bool(np.isfinite(entropy).all())
    fit = _by_entropy(tokens) if known else _by_score(tokens)
    if fit is None or fit.share < FITS or abs(fit.slope) > STEEPEST or not together(tokens):
        return None
    rest = tokens.difference - fit.fitted
    gone = explained(tokens.difference, rest)
    # the slope is on the mean of both columns: s = 2 (b - 1) / (b + 1)
    sharper = (2 + fit.slope) / (2 - fit.slope)
    one, other = sample.first_name, sample.second_name
    whole = _nothing_else(sample, tokens, rest, sharper)
    if sharper < 1:
        one, other, sharper = other, one, 1 / sharper
    if sharper < 1 + NEAR:
        whole = whole and known and _is_set(sharper, fit.error)
    about = "" if known else "about "
    return Finding(
        test="temperature",
        pair=sample.name,
        side=None,
        summary=f"{one} is of logits divided by {about}{1 / sharper:.2f} where {other} is raw (or "
        f"{other} of logits divided by {about}{sharper:.2f} where {one} is raw)",
        evidence=(
            f"the difference changes by {fit.slope:+.4f} nat for each nat of log-prob"
            + (" among contexts of one entropy" if known else ""),
            f"a temperature explains {fit.share:.0%} of the squared difference, and leaves "
            f"{mae(rest):.6f} of {mae(tokens.difference):.6f} nat",
            f"the entropy of {sample.entropy_of} was known"
            if known
            else "no entropy was recorded, so that the temperature is an estimate",
            "a gain on all logits, as of the final norm or the head, does the same",
        ),
        false_alarm=fit.chance if whole else max(fit.chance, DOUBTFUL),
        explains=gone,
        tokens=len(tokens),
        mae=mae(tokens.difference),
    )


def _nothing_else(sample: PairSample, tokens: Tokens, rest: Array, sharper: float) -> bool:
    """Say whether a temperature, and noise that is really there, make the gap.

    The noise is what a third column shows. Without entropies the rest is mostly theirs, and what
    counts is what no temperature can make. ``sharper`` is that of first over second.
    """
    gap, natural = mae(tokens.difference), sample.natural
    if np.isnan(natural):
        # no third column; but A and B share weights, so that no update sharpened one
        shared = {sample.first_name[0], sample.second_name[0]} == {"A", "B"}
        natural = np.inf if shared else 0.0
    if np.isfinite(tokens.entropy).all():
        left = mae(rest)
        noisy = left < min((1 - NOISED) * gap, 2 * natural)
        return noisy or left < (1 - SURE) * gap
    far = min(
        mae(outside(tokens.second, tokens.first, sharper)),
        mae(outside(tokens.first, tokens.second, 1 / sharper)),
    )
    noisy = far < min(NOISY * gap, OF_NOISE * natural)
    return noisy or far < IMPOSSIBLE * gap


def _is_set(sharper: float, error: float) -> bool:
    """Say whether a temperature near 1 is a round one, which is known well enough to say so."""
    if 3 * error > ROUND / 4:
        return False
    away = [abs(t / ROUND - round(t / ROUND)) * ROUND for t in (1 / sharper, sharper)]
    return sharper > 1 + ROUND / 2 and min(away) < EXACT + 2 * error


def _by_entropy(tokens: Tokens) -> _Fit | None:
    """Slope on the score among contexts of one entropy."""
    entropy = np.maximum(tokens.entropy, 0.0)
    fit = _regress(tokens, [entropy, entropy**2, np.sqrt(entropy)], np.ones(len(tokens), bool))
    if fit is None:
        return None
    # a temperature's part in the context is the slope times an entropy close to the known one
    context = fit.fitted - fit.slope * tokens.mean
    weight = entropy > 0.05
    level = float((context * entropy)[weight].sum() / max((entropy**2)[weight].sum(), 1e-300))
    return fit if 0.5 < level / fit.slope < 1.6 else None


def _by_score(tokens: Tokens) -> _Fit | None:
    """Slope on the score of unlikely tokens, whose contexts' entropy hardly depends on it."""
    score = tokens.mean
    part = score < -1.0
    if part.sum() < 32:
        return None
    fit = _regress(tokens, [np.ones(len(tokens))], part)
    if fit is None:
        return None
    near = (score > -0.7) & (score < -0.05)
    gain = float(tokens.difference[near].mean()) if near.any() else 0.0
    # likely tokens gain where unlikely ones lose, which no factor on the scores does
    if gain * fit.slope <= 0:
        return None
    knots = np.array([-30.0, -4.0, -2.0, -1.0, -0.5, -0.2, -0.05, 0.0])
    middles = [
        float(np.median(tokens.difference[(score >= low) & (score <= high)]))
        if ((score >= low) & (score <= high)).sum() >= 5
        else 0.0
        for low, high in zip(knots[:-1], knots[1:], strict=True)
    ]
    fitted = np.interp(score, (knots[:-1] + knots[1:]) / 2, middles)
    fitted = np.where(part, fit.fitted, fitted)
    # d / l is below b - 1 for every token, and near it for unlikely ones in sure contexts
    least = score < min(-4.0, float(np.quantile(score, 0.05)))
    bound = fit.slope
    if least.sum() >= 8:
        ratio = tokens.difference[least] / score[least]
        bound = float(np.quantile(ratio * np.sign(fit.slope), 0.9)) * np.sign(fit.slope)
    slope = max(fit.slope, bound, key=abs)
    return _Fit(slope, fit.error, fit.chance, fit.share, fitted)


def _regress(tokens: Tokens, others: list[Array], part: NDArray[np.bool_]) -> _Fit | None:
    """Robust regression of the difference on the mean score and ``others``; None if flat.

    Noise grows with 1 - p, so tokens are weighted by its inverse square; what is far from the fit
    counts by its sign alone (Huber). The chance is that of a slope that noise cannot bend.
    """
    kept = tokens.where(part)
    difference, score = kept.difference, kept.mean
    columns = np.stack([score, *(other[part] for other in others)], 1)
    columns = columns[:, np.abs(columns).max(0) > 0]
    base = 1 / (0.05 + 1 - np.exp(np.minimum(score, 0))) ** 2
    weight, found = base, np.full(columns.shape[1], np.inf)
    for _ in range(8):
        scaled = columns * weight[:, None]
        last, found = (
            found,
            np.linalg.lstsq(scaled.T @ columns, scaled.T @ difference, rcond=1e-10)[0],
        )
        rest = difference - columns @ found
        if abs(found[0] - last[0]) < 1e-4:
            break
        size = np.abs(rest) * np.sqrt(base)
        limit = 2.5 * max(float(np.median(size)) / 0.6745, 1e-12)
        weight = base * np.minimum(1.0, limit / np.maximum(size, 1e-300))
    slope = float(found[0])
    # score with what the other columns say of it taken out
    around = columns[:, 1:]
    scaled = around * weight[:, None]
    own = score - around @ np.linalg.lstsq(scaled.T @ around, scaled.T @ score, rcond=1e-10)[0]
    power = float((weight * own**2).sum())
    if power <= 0 or not np.isfinite(slope):
        return None
    error, freedom = spread_of_sum(weight * own * rest, kept)
    # noise in the score itself makes a slope: half its variance over the score's at the most
    bent = 0.5 * float((weight * rest**2).sum()) / power
    chance = t_tail((abs(slope) - LEAST - bent) * power / max(error, 1e-300), freedom)
    if chance > 0.01:
        return None
    whole = np.stack([tokens.mean, *others], 1)
    fitted = whole @ found if whole.shape[1] == len(found) else whole[:, :1] @ found[:1]
    share = 1 - float((weight * rest**2).sum() / max((weight * difference**2).sum(), 1e-300))
    return _Fit(slope, error / power, chance, share, fitted)
