"""Probabilities recorded after a sampler's filters or penalties, against raw ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.fill import filled
from layerbisect.bisect.shapes.offset import constant_offset
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.scale import LONE, alone, factor, in_proportion, scaled
from layerbisect.bisect.shapes.tokens import (
    Tokens,
    chance_of_signs,
    explained,
    mae,
    spread_of_sum,
    t_tail,
    together,
)

Array = NDArray[np.float64]

RAISED = 20
"""Tokens that have to be raised clearly before a filter is looked for."""

AGAINST = 0.03
"""Share of clear differences that may have the other sign: noise of unlikely tokens."""

LEAST = 0.01
"""Mean difference (nat) of repeated tokens from which on a penalty is looked for."""

EVEN = 0.1
"""Difference of mean ranks, within -1 to 1, that other causes may make."""

DOUBTFUL = 1e-3
"""Chance given where something else than a filter raises scores alike."""


def renormalised(sample: PairSample) -> Finding | None:
    """Find scores renormalised over a part of the vocabulary, as top-p and top-k leave it.

    They are raised by -log of the kept mass: never lowered, not at all in sure contexts, by at most
    -log(p) with top-p, which keeps at least p.
    """
    tokens = Tokens.of(sample)
    if tokens is None or factor(tokens) is not None or scaled(tokens) is not None:
        return None
    sign = 1.0 if tokens.difference.mean() > 0 else -1.0
    names = (sample.first_name, sample.second_name)
    raised, raw = names if sign > 0 else names[::-1]
    high = tokens.first if sign > 0 else tokens.second
    gain = sign * tokens.difference
    up, down = gain[gain > 0], -gain[gain < 0]
    # what is lowered is noise: little in sum, and none of it as large as what is raised
    noise = float(np.quantile(down, 0.9)) if len(down) >= 10 else 0.0
    if down.sum() > 0.1 * up.sum() or noise > max(0.05, 0.15 * float(up.mean())):
        return None
    clear = max(0.01, 2 * noise)
    over, under = int((gain > clear).sum()), int((gain < -clear).sum())
    if over < RAISED or under > AGAINST * over:
        return None
    largest = float(np.quantile(gain, 0.99))
    # a constant leaves no token alone, and a renormalised score cannot pass 0
    little = float((gain < largest / 4).mean())
    if little < 0.03 or (high > 1e-3).mean() > 0.001:
        return None
    # where top-p or min-p leave one token alone its score is 0
    whole = alone(tokens)
    bound = float(np.quantile(gain, 0.9))
    piled = float((gain[gain > clear] > 0.6 * bound).mean())
    nucleus = int(whole.sum()) >= LONE
    if in_proportion(tokens) is not None or not together(tokens):
        return None
    if constant_offset(sample) is not None or filled(sample) is not None:
        return None
    part = np.abs(gain) > clear
    chance = chance_of_signs(np.sign(gain[part]), tokens.where(part))
    if not nucleus and not np.isfinite(tokens.entropy).all():
        chance = max(chance, DOUBTFUL)
    what = "as top-k does"
    if nucleus:
        what = f"as top-p {np.exp(-bound):.2f} does" if piled > 0.6 else "as min-p does"
    mass = np.exp(-largest)
    return Finding(
        test="renormalised top-p/top-k",
        pair=sample.name,
        side=None,
        summary=f"{raised} looks renormalised over a part of the vocabulary ({what}; kept mass "
        f"down to {mass:.2f}) where {raw} is over all of it",
        evidence=(
            f"{raised} is above {raw} by more than {clear:.3f} nat on {over} tokens and below by "
            f"as much on {under}",
            f"{little:.0%} of the tokens are raised by less than a quarter of {largest:.4f} nat",
            f"{int(whole.sum())} raised scores are exactly 0, {piled:.0%} of the raised ones are "
            f"above 0.6 of {bound:.4f} nat",
        ),
        false_alarm=min(1.0, chance),
        explains=explained(gain, gain - _by_context(tokens, gain)),
        tokens=over,
        mae=mae(gain[gain > clear]),
        where=f"tokens that {raised} raises",
    )


def _by_context(tokens: Tokens, gain: Array) -> Array:
    """The usual gain among tokens of about one entropy, or of about one score (nat)."""
    known = np.isfinite(tokens.entropy).all()
    by = tokens.entropy if known else tokens.mean
    parts = np.array_split(np.argsort(by, kind="stable"), 20)
    usual = np.zeros(len(gain))
    for part in parts:
        usual[part] = np.median(gain[part])
    return usual


def penalty(sample: PairSample) -> Finding | None:
    """Find scores after a penalty on tokens that the response already holds."""
    tokens = Tokens.of(sample)
    if tokens is None or factor(tokens) is not None:
        return None
    seen = _seen(sample)[sample.active]
    if seen.sum() < RAISED or (~seen).sum() < RAISED:
        return None
    difference = tokens.difference
    limit = float(np.quantile(np.abs(difference), 0.99))
    held = np.clip(difference, -limit, limit)
    sign = 1.0 if held[seen].mean() > held[~seen].mean() else -1.0
    names = (sample.first_name, sample.second_name)
    penalised, raw = names if sign < 0 else names[::-1]
    level = {flag: sign * float(held[seen == flag].mean()) for flag in (True, False)}
    down = float((sign * difference[seen] > 0).mean())
    if level[True] < LEAST or level[False] > 0 or down < 0.7 or not together(tokens):
        return None
    # ranks: a penalty moves tokens by very different amounts
    ranks = np.argsort(np.argsort(difference, kind="stable"), kind="stable")
    gap, chance = _contrast(tokens, 2 * ranks / len(ranks) - 1, seen, tokens.mean)
    if chance > 1e-3 or gap * sign < 0:
        return None
    usual = np.where(seen, *(np.median(difference[seen == flag]) for flag in (True, False)))
    return Finding(
        test="penalty on seen tokens",
        pair=sample.name,
        side=None,
        summary=f"{penalised} is lower than {raw} on tokens that the response already holds, by "
        f"{level[True]:.3f} nat in the mean, and higher on others, by {-level[False]:.3f}: as a "
        "repetition penalty does",
        evidence=(
            f"{down:.0%} of {int(seen.sum())} repeated tokens are lower in {penalised}",
            f"among tokens of one score, repeated ones stand {abs(gap) / 2:.0%} of the ranks "
            "apart from new ones",
        ),
        false_alarm=chance,
        explains=explained(difference, difference - usual),
        tokens=int(seen.sum()),
        mae=mae(difference[seen]),
        where="tokens seen before in their response",
    )


def _seen(sample: PairSample) -> NDArray[np.bool_]:
    """Whether a token stands earlier in its response, masked ones included, bool [token]."""
    pairs = sample.call * (int(sample.token.max()) + 1) + sample.token
    first = np.zeros(len(pairs), bool)
    first[np.unique(pairs, return_index=True)[1]] = True
    return ~first


def _contrast(
    tokens: Tokens, held: Array, seen: NDArray[np.bool_], score: Array
) -> tuple[float, float]:
    """How the values of repeated tokens differ from new ones' of one score, and its chance."""
    ranks = np.argsort(np.argsort(score, kind="stable"), kind="stable")
    bins = ranks * 10 // len(score)
    count = np.bincount(bins)
    share = np.bincount(bins, seen) / count
    own = seen - share[bins]
    power = float((own**2).sum())
    if power <= 0:
        return 0.0, 1.0
    level = np.bincount(bins, held) / count
    gap = float((own * (held - level[bins])).sum() / power)
    rest = held - level[bins] - gap * own
    error, freedom = spread_of_sum(own * rest, tokens)
    return gap, t_tail((abs(gap) - EVEN) * power / max(error, 1e-300), freedom)
