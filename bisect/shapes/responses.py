"""Whole responses that stand apart from the others, and what parts them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.chance import log_choose, log_normal_tail
from layerbisect.bisect.shapes.gaps import ALLOWED, RAISED, Gaps, by_call, chance, explained
from layerbisect.bisect.shapes.lag import Scores, listed, responses
from layerbisect.bisect.shapes.pairing import relation, swaps
from layerbisect.bisect.shapes.sample import PairSample

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

# unsure tokens from which a response has a median to speak of
_ENOUGH = 16
# natural deviation of the log of a response's median gap: factors of 1.6 are ordinary; and what
# the median of so many correlated tokens adds, times the root of their number
_SPREAD = 0.5
_OF_MEDIAN = 1.7
# for so many responses the natural deviation counts beside what the sample shows
_PRIOR = 8
# how many times larger than in the other responses gaps must be, and how large (nat): single
# responses are noisier than all together
_RATIO = 5.0
_FAR = 0.1
# a property parts the responses when chance does so less often
_PARTS = 1e-2
# mean gaps (nat) of a response's first tokens, and of its later half, from which it looks scored in
# another context; that tells most at the start, unless the two columns are hardly related at all
_START, _LATER = 0.5, 0.1
_FIRST = 8
_FADES = 2.0
_HARDLY = 0.6
# loss of rank correlation
_LOST = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """The responses with enough unsure tokens, all arrays [call].

    ``calls`` int64, ``tokens`` int64 how many unsure ones, ``median`` float64 their median relative
    gap, ``mean`` float64 the mean absolute difference of all tokens (nat).
    """

    calls: Ints
    tokens: Ints
    median: Array
    mean: Array


@dataclass(frozen=True, slots=True, eq=False)
class Apart:
    """Responses that stand apart, bool among ``calls`` [call], and the log chance of it."""

    calls: Ints
    apart: NDArray[np.bool_]
    log_chance: float


def levels(gaps: Gaps) -> Levels:
    """How far apart each response is; those with few unsure tokens are left out."""
    parts = [p for p in by_call(gaps.call) if gaps.unsure[p].sum() >= _ENOUGH]
    return Levels(
        np.array([gaps.call[p.start] for p in parts], np.int64),
        np.array([gaps.unsure[p].sum() for p in parts], np.int64),
        np.array([np.median(gaps.relative[p][gaps.unsure[p]]) for p in parts]),
        np.array([np.abs(gaps.d[p]).mean() for p in parts]),
    )


def stand_apart(sample: PairSample, gaps: Gaps) -> Apart | None:
    """Split the responses into most that agree and some that don't, None where nothing parts them.

    The chance counts all ways to choose those apart.
    """
    found = levels(gaps)
    calls, level, mean = found.calls, found.median, found.mean
    if len(calls) < 4:
        return None
    order = np.argsort(level, kind="stable")
    steps = np.diff(np.log(level)[order])
    # at least half must agree, and two
    allowed = np.arange(len(steps)) + 1 >= max(2, len(calls) / 2)
    kept = int(np.where(allowed, steps, -1.0).argmax()) + 1
    low, high = order[:kept], order[kept:]
    far = float(mean[high].mean())
    usual = float(np.exp(np.log(level[low]).mean()))
    if level[high].min() < ALLOWED * usual or np.median(level[high]) < _RATIO * usual:
        return None
    if far < max(_FAR, _RATIO * float(mean[low].mean())):
        return None
    apart = np.zeros(len(calls), bool)
    apart[high] = True
    log = log_apart(found, apart, sample.prompt[calls])
    log += log_choose(len(calls), len(high)) + math.log(len(calls))
    return Apart(calls, apart, min(0.0, log))


def log_apart(found: Levels, apart: NDArray[np.bool_], prompt: Ints) -> float:
    """Log of the chance that the responses ``apart``, [call], all are so far apart by chance.

    Logs of medians are normal with the others' deviation, or `_SPREAD` where these show less, and
    with their own. Responses to one ``prompt`` may be noisy together, and count once.
    """
    logs = np.log(found.median)
    low = logs[~apart]
    seen = float(((low - low.mean()) ** 2).sum())
    variance = (seen + _PRIOR * _SPREAD**2) / (len(low) - 1 + _PRIOR) * (1.0 + 1.0 / len(low))
    own = _OF_MEDIAN**2 / found.tokens[apart]
    z = float(((logs[apart] - low.mean()) / np.sqrt(variance + own)).min())
    return len(np.unique(prompt[apart])) * log_normal_tail(z)


def some_responses(sample: PairSample) -> Finding | None:
    """Find whole responses that disagree while the others agree, and what parts the two."""
    return _finding(sample, mispaired=False)


def mispaired_samples(sample: PairSample) -> Finding | None:
    """Find a few responses scored in another context: far apart throughout, the others agree."""
    return _finding(sample, mispaired=True)


def _finding(sample: PairSample, *, mispaired: bool) -> Finding | None:
    gaps = Gaps.distinct(sample)
    split = stand_apart(sample, gaps) if gaps is not None else None
    if gaps is None or split is None or split.log_chance > RAISED:
        return None
    calls = [int(c) for c in split.calls[split.apart]]
    if set(calls) & set(swaps(sample)[0]):
        return None
    parted = _properties(sample, split)
    sure = [p for p in parted if p[1] <= _PARTS]
    scores = {r.call: r for r in responses(sample)}
    relations = {call: relation(r) for call, r in scores.items()}
    wrong = [c for c in calls if _is_wrong(scores[c])]
    others = [relations[int(c)] for c in split.calls[~split.apart]]
    lost = float(np.median(others)) - float(np.median([relations[c] for c in calls]))
    few = len(calls) <= len(split.calls) / 4 and not sure
    if (few and len(wrong) == len(calls) and lost >= _LOST) != mispaired:
        return None
    here = np.isin(gaps.call, calls)
    far, near = (float(np.abs(gaps.d[part]).mean()) for part in (here, ~here))
    what = sure[0][0] if sure else listed(sample, calls)
    return Finding(
        test="mispaired samples" if mispaired else "some responses",
        pair=sample.name,
        side=None,
        summary=f"{what}: {far:.4f} nat apart, while the others are {near:.4f}"
        + (", as if one side had scored them in another context" if mispaired else ""),
        evidence=(
            f"{len(calls)} of {len(split.calls)} responses: {listed(sample, calls)}",
            *(f"they are the {name} (by chance: {p:.1e})" for name, p in parted),
            f"rank correlation of both sides {np.median([relations[c] for c in calls]):.3f} in "
            f"them and {np.median(others):.3f} in the others",
        ),
        false_alarm=chance(split.log_chance),
        explains=explained(gaps, here),
        tokens=int(here.sum()),
        mae=far,
        where=what,
    )


def _is_wrong(scores: Scores) -> bool:
    sizes = np.abs(scores.first - scores.second)
    sizes = sizes[np.isfinite(sizes)]
    start, later = sizes[:_FIRST], sizes[len(sizes) // 2 :]
    if float(start.mean()) < _START or float(later.mean()) < _LATER:
        return False
    return float(start.mean()) >= _FADES * float(later.mean()) or relation(scores) < _HARDLY


def _properties(sample: PairSample, split: Apart) -> list[tuple[str, float]]:
    """Name what parts the responses, and how often chance parts as well, the likeliest cause first.

    Each is a property that all of those apart have and no other response has.
    """
    tries = 4
    apart = split.apart
    groups = np.array([sample.groups[c] for c in split.calls])
    found = []
    inside = set(groups[apart])
    if "" not in inside and not inside & set(groups[~apart]):
        names = ", ".join(sorted(inside)[:4]) + (" ..." if len(inside) > 4 else "")
        ways = log_choose(len(set(groups)), len(inside))
        # samples of one prompt are no independent draws: groups are; and where each response is a
        # group of its own, any of them are some groups
        log = max(-ways, ways - log_choose(len(apart), int(apart.sum())))
        said = f"responses of group{'s' if len(inside) > 1 else ''} {names}"
        found.append((said, min(1.0, tries * math.exp(log))))
    prompts, lengths = sample.prompt_lengths[split.calls], sample.lengths[split.calls]
    for name, values in (
        ("responses whose prompts are", prompts),
        ("responses that are", lengths),
        ("responses that with their prompts are", prompts + lengths),
    ):
        log = -log_choose(len(apart), int(apart.sum()))
        p = min(1.0, 2 * tries * math.exp(log))
        if values[apart].min() > values[~apart].max():
            found.append((f"{name} longer than {values[~apart].max()} tokens", p))
        elif values[apart].max() < values[~apart].min():
            found.append((f"{name} shorter than {values[~apart].min()} tokens", p))
    return sorted(found, key=lambda item: item[1])
