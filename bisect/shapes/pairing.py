"""Responses whose columns don't belong together: swapped, mispaired, or unrelated throughout."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.chance import (
    EVERY,
    log_choose,
    log_match_chance,
    log_normal_tail,
    normal_ranks,
)
from layerbisect.bisect.shapes.chunks import chunk_order
from layerbisect.bisect.shapes.gaps import RAISED, chance, contexts
from layerbisect.bisect.shapes.lag import BAD, CLOSE, Scores, is_close, listed, responses, shift
from layerbisect.bisect.shapes.sample import PairSample

Array = NDArray[np.float64]

# responses that are looked for, how far around each others are looked at, and tokens of each
_RESPONSES = 128
_NEAR = 4
_TOKENS = 256
_MOST = 0.9
# related scores have at least this rank correlation, and unrelated ones at most that
_RELATED = 0.5
_UNRELATED = 0.2


def swaps(sample: PairSample) -> tuple[dict[int, int], float]:
    """Return which response's second scores each response's first ones match, and the log chance.

    Only responses that disagree are looked for, the worst ones, among themselves and responses
    near them. A token that two of them have in one context has the same score in both, and tells
    nothing.
    """
    every = responses(sample)
    worst = sorted((i for i, r in enumerate(every) if r.gap > 2 * BAD), key=lambda i: -every[i].gap)
    if not worst or len(every) < 2:
        return {}, 0.0
    worst = worst[:_RESPONSES]
    near = {j for i in worst for j in range(i - _NEAR, i + _NEAR + 1) if 0 <= j < len(every)}
    bad = [every[i] for i in worst]
    others = bad + [every[i] for i in sorted(near - set(worst))]
    width = min(_TOKENS, max(len(r.first) for r in others))
    second = np.full((len(others), width), np.nan)
    at_call = np.cumsum(sample.lengths) - sample.lengths
    known = contexts(sample, after=True)
    keys = np.zeros(second.shape, np.int64)
    for row, key, scores in zip(second, keys, others, strict=True):
        row[: len(scores.second)] = scores.second[:width]
        key[: len(scores.second)] = known[at_call[scores.call] :][: min(width, len(scores.second))]
    found: dict[int, int] = {}
    logs: list[float] = []
    for at, scores in enumerate(bad):
        best = _match(scores, np.where(keys == keys[at], np.nan, second))
        if best is None:
            continue
        partner = others[best].call
        overlap = min(len(scores.first), len(others[best].second))
        mine, theirs = (known[at_call[c] :][:overlap] for c in (scores.call, partner))
        left, own = scores.first[:overlap], scores.second[:overlap]
        right = np.where(mine == theirs, np.nan, others[best].second[:overlap])
        if not is_close(left, right, scores.gap) or is_close(left, own, scores.gap):
            continue
        log = log_match_chance(left, right, own) + math.log(len(others))
        if log < 0.0:
            found[scores.call] = partner
            logs.append(log)
    return found, sum(logs) + log_choose(len(bad), len(found))


def _match(scores: Scores, second: Array) -> int | None:
    """Return the row of ``second`` nearest to these scores, None where their own are as near."""
    width = min(second.shape[1], len(scores.first))
    # nats beyond one tell nothing more
    apart = np.minimum(np.abs(second[:, :width] - scores.first[:width]), 1.0)
    counted = np.isfinite(apart).sum(1)
    mean = np.nansum(apart, axis=1) / np.maximum(counted, 1)
    mean[counted < min(16, width)] = np.inf
    best = int(mean.argmin())
    own = np.minimum(np.abs(scores.second - scores.first)[:width], 1.0)
    there = np.isfinite(apart[best]) & np.isfinite(own)
    return best if there.any() and mean[best] <= 2 * CLOSE * own[there].mean() else None


def swapped_samples(sample: PairSample) -> Finding | None:
    """Find responses whose first scores are those that the second column holds for another one."""
    found, log = swaps(sample)
    if not found or log > RAISED:
        return None
    here = np.isin(sample.call, list(found)) & sample.active
    sizes = np.abs(sample.first - sample.second)
    gap = float(sizes[here].mean())
    names = sample.names
    pairs = ", ".join(f"{names[i]} holds {names[j]}" for i, j in sorted(found.items())[:8])
    cycle = set(found) == set(found.values())
    apart = [r for r in responses(sample) if r.gap > 2 * BAD]
    examined = min(len(apart), _RESPONSES)
    throughout = len(apart) == len(sample.lengths) and len(found) >= _MOST * examined
    return Finding(
        test="swapped samples",
        pair=sample.name,
        side=None,
        summary=f"{sample.first_name} of {len(found)} responses matches {sample.second_name} of "
        "other responses" + (": the same responses in another order" if cycle else ""),
        evidence=(
            f"{pairs}" + (" ..." if len(found) > 8 else ""),
            f"as they are recorded these responses are {gap:.4f} nat apart",
            f"{examined} of the {len(apart)} responses that disagree were looked for",
        ),
        false_alarm=chance(log),
        explains=float(sizes[here].sum() / sizes[sample.active].sum()),
        tokens=int(here.sum()),
        mae=gap,
        where="" if throughout else listed(sample, sorted(found)),
    )


def relation(scores: Scores) -> float:
    """Rank correlation of a response's two columns."""
    both = np.isfinite(scores.first) & np.isfinite(scores.second)
    return float(np.mean(normal_ranks(scores.first[both]) * normal_ranks(scores.second[both])))


def unrelated_scores(sample: PairSample) -> Finding | None:
    """Find columns that have no more to do with each other than scores of different tokens.

    They then are of other tokens, other contexts or other weights; where they match at another
    place, `shift`, `chunk_order` and `swapped_samples` say so instead.
    """
    every = [r for r in responses(sample) if np.isfinite(r.first).sum() >= 2 * EVERY]
    tokens = sum(int(np.isfinite(r.first).sum()) for r in every)
    if not every or tokens <= 4 * EVERY:
        return None
    counts = [int(np.isfinite(r.first).sum()) for r in every]
    related = [relation(r) for r in every]
    mean = float(np.average(related, weights=counts))
    gap = float(np.average([r.gap for r in every], weights=counts))
    free = tokens / EVERY - 3.0
    log = log_normal_tail(
        (math.atanh(_RELATED) - math.atanh(min(mean, 1 - 1e-9))) * math.sqrt(free)
    )
    if mean > _UNRELATED or gap < 2 * BAD or log > RAISED:
        return None
    if any(test(sample) for test in (shift, chunk_order, swapped_samples)):
        return None
    spread = [float(np.std(v[sample.active])) for v in (sample.first, sample.second)]
    if min(spread) < BAD:
        return None
    means = [float(np.mean(v[sample.active])) for v in (sample.first, sample.second)]
    return Finding(
        test="unrelated scores",
        pair=sample.name,
        side=None,
        summary=f"{sample.first_name} and {sample.second_name} have nothing to do with each other: "
        "scores of other tokens, other contexts or other weights",
        evidence=(
            f"rank correlation {mean:.2f} within responses over {tokens} tokens; related scores "
            f"have at least {_RELATED}",
            f"means {means[0]:.2f} and {means[1]:.2f} nat, deviations {spread[0]:.2f} and "
            f"{spread[1]:.2f}",
        ),
        false_alarm=chance(log),
        explains=1.0,
        tokens=tokens,
        mae=gap,
    )
