"""The gap between two columns, token by token, made comparable between tokens and responses.

Natural noise is larger where a token was unlikely, and in some responses; its tails are heavy. So
sizes are taken relative to those of tokens that were about as likely, and then only their ranks
within a response are used. A token that both sides are sure of stays where it is whatever moves
the logits; such tokens may be most of a response, and the others alone are looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.shapes.chance import log_gamma_bound, log_gamma_tail
from layerbisect.bisect.shapes.sample import PairSample

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# nat: smaller differences are all the same to a user
FLOOR = 0.001
# nat: a token is sure whose higher log-prob is so near to 0, and has moved if it differs so much;
# beyond 0 it is no log-prob, and that tells
SURE = 0.02
# nat: mean absolute difference that two bfloat16 engines may have without a fault
NATURAL = 0.06
# so much larger may some places' noise be without a fault
ALLOWED = 3.0
# what is raised at all; a judge may want far less
RAISED = math.log(1e-4)
# share of a place's sure tokens that have moved, where these tell
_MOVED = 0.75
# unsure tokens below which nothing is looked for
_FEWEST = 32
_BINS = 16
_BIN_TOKENS = 64
_LAGS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """The active tokens of a sample, in their order.

    Attributes:
        d: float64 [token], first minus second (nat).
        size: float64 [token], its absolute value, or `FLOOR` where that is less.
        relative: float64 [token], ``size`` over that of tokens with about the same score.
        call, index, position: int64 [token], as in the sample. last: int64 [token], place from the
            response's end, 0 for its last token.
        context: int64 [token], the same for tokens that follow the same tokens: their noise is the
            same, too.
        unsure: bool [token], where both columns are.
    """

    d: Array
    size: Array
    relative: Array
    call: Ints
    index: Ints
    position: Ints
    last: Ints
    context: Ints
    unsure: Bools

    @classmethod
    def of(cls, sample: PairSample) -> Gaps | None:
        """Gather them; None where nothing differs or there is too little to tell."""
        active = sample.active
        d = sample.difference
        size = np.maximum(np.abs(d), FLOOR)
        call, index = sample.call[active], sample.index[active]
        level = np.maximum(sample.first, sample.second)[active]
        unsure = np.abs(level) >= SURE
        if int(unsure.sum()) < _FEWEST or not (size > FLOOR).any():
            return None
        return cls(
            d=d,
            size=size,
            relative=size / _usual(size, level, unsure),
            call=call,
            index=index,
            position=sample.position[active],
            last=sample.lengths[call] - 1 - index,
            context=contexts(sample)[active],
            unsure=unsure,
        )

    @classmethod
    def distinct(cls, sample: PairSample) -> Gaps | None:
        """Gather them, of tokens in one context the first alone; None as for `of`."""
        gaps = cls.of(sample)
        if gaps is None:
            return None
        kept = np.zeros(len(gaps.d), bool)
        kept[np.unique(gaps.context, return_index=True)[1]] = True
        return gaps.only(kept)

    def views(self) -> list[Bools]:
        """Which tokens to look at, [token]: the unsure ones, and then sure ones that moved as well.

        A fault may put other scores where nearly all are sure, as at the end of a response.
        """
        moved = ~self.unsure & (np.abs(self.d) >= SURE)
        return [self.unsure, self.unsure | moved] if moved.any() else [self.unsure]

    def all_moved(self, kept: Bools, chosen: Bools) -> bool:
        """Say whether sure ``chosen`` tokens among those ``kept`` in a view, [token], are the rule.

        Few that moved among many are outliers.
        """
        sure = chosen & ~self.unsure
        return not (kept & sure).any() or bool(kept[sure].mean() >= _MOVED)

    def only(self, kept: Bools) -> Gaps:
        """These tokens alone, [token]."""
        return Gaps(*(getattr(self, name)[kept] for name in self.__slots__))


def contexts(sample: PairSample, *, after: bool = False) -> Ints:
    """Hash the prompt and the response's tokens before each one, and itself if ``after``."""
    longest = int(sample.lengths.max(initial=0))
    # wrapping sums of products with odd numbers: hashes that grow token by token
    factor = np.random.default_rng(0).integers(0, 1 << 63, longest + 1, np.uint64) * 2 + 1
    each = (sample.token.astype(np.uint64) + 1) * factor[1 + sample.index]
    before = np.cumsum(each, dtype=np.uint64) - each
    starts = np.cumsum(sample.lengths) - sample.lengths
    start = np.r_[before, np.uint64(0)][starts]
    prompt = sample.prompt.astype(np.uint64) * factor[0]
    upto = before + each if after else before
    hashes: Ints = (upto - start[sample.call] + prompt[sample.call]).astype(np.int64)
    return hashes


def _usual(size: Array, level: Array, unsure: Bools) -> Array:
    """Return the median ``size`` of tokens with about the same ``level``, [token].

    Sure tokens are a level of their own.
    """
    bins = min(_BINS, max(1, int(unsure.sum()) // _BIN_TOKENS))
    edges = np.quantile(level[unsure], np.arange(1, bins) / bins)
    which = np.where(unsure, np.searchsorted(edges, level, side="right"), bins)
    order = np.argsort(which, kind="stable")
    medians = np.full(bins + 1, FLOOR)
    for found, part in zip(
        np.unique(which), np.split(order, np.flatnonzero(np.diff(which[order])) + 1), strict=True
    ):
        medians[found] = np.median(size[part])
    usual: Array = medians[which]
    return usual


def by_call(call: Ints) -> list[slice]:
    """Where each call's tokens are, ``call`` [token] being in order."""
    edges = np.flatnonzero(np.r_[True, call[1:] != call[:-1], True])
    return [slice(int(a), int(b)) for a, b in pairwise(edges)]


def surprise(values: Array, call: Ints) -> Array:
    """Minus the log of each value's rank within its call, counted from the largest, over how many.

    Of exchangeable values each is at most exponential with mean 1. Equal values get the largest
    rank among them.
    """
    order = np.lexsort((-values, call))
    ranked, calls = values[order], call[order]
    new_call = np.flatnonzero(np.r_[True, calls[1:] != calls[:-1]])
    counts = np.diff(np.r_[new_call, len(order)])
    start = np.repeat(new_call, counts)
    new_run = np.flatnonzero(np.r_[True, (calls[1:] != calls[:-1]) | (ranked[1:] != ranked[:-1])])
    run_end = np.r_[new_run[1:], len(order)]
    rank = np.repeat(run_end, np.diff(np.r_[new_run, len(order)])) - start
    out = np.empty(len(order))
    out[order] = -np.log(rank / np.repeat(counts, counts))
    return out


def log_set_chance(gaps: Gaps, chosen: Bools, allowed: float = ALLOWED) -> float:
    """Log of the chance that the ``chosen`` tokens, [token], are this much larger by chance.

    They may be larger by a factor of ``allowed`` without counting. Their ranks from the top count,
    or the others' from the bottom, whichever says more. Neighbours' correlation, which the sample
    shows, makes fewer tokens count.
    """
    if not chosen.any() or chosen.all():
        return 0.0
    scaled = np.where(chosen, gaps.relative / allowed, gaps.relative)
    return min(
        0.0,
        math.log(2.0)
        + min(
            _log_rank_chance(values, gaps.call, part)
            for values, part in ((scaled, chosen), (-scaled, ~chosen))
        ),
    )


def _log_rank_chance(values: Array, call: Ints, chosen: Bools) -> float:
    surprises = surprise(values, call)
    count, total = int(chosen.sum()), float(surprises[chosen].sum())
    if len(np.unique(call[chosen])) == count:
        return log_gamma_tail(count, total)
    return log_gamma_bound(count, total) / inflation(surprises, chosen, call)


def inflation(values: Array, chosen: Bools, call: Ints) -> float:
    """By how much correlation of neighbours widens a sum of ``values`` over ``chosen`` tokens."""
    apart = 0.0 if chosen.all() else values[chosen].mean() - values[~chosen].mean()
    rest = values - apart * chosen
    rest = rest - rest.mean()
    variance = float(np.mean(rest**2))
    if variance <= 0.0:
        return 1.0
    count, widened = int(chosen.sum()), 1.0
    for lag in range(1, min(_LAGS, len(values) - 1) + 1):
        same = call[lag:] == call[:-lag]
        if not same.any():
            break
        correlation = float((rest[lag:] * rest[:-lag])[same].mean()) / variance
        if correlation < 2.0 / math.sqrt(same.sum()):
            break
        widened += 2.0 * correlation * float((chosen[lag:] & chosen[:-lag] & same).sum()) / count
    return widened


def chance(log: float, tries: float = 1.0) -> float:
    """The chance whose log is ``log``, after so many tries; at most 1."""
    return min(1.0, math.exp(min(0.0, log + math.log(tries))))


def explained(gaps: Gaps, chosen: Bools) -> float:
    """Share of the absolute gap that goes when the ``chosen`` tokens are like the others."""
    sizes = np.abs(gaps.d)
    total = float(sizes.sum())
    if total <= 0.0 or not chosen.any():
        return 0.0
    usual = float(sizes[~chosen].mean()) if not chosen.all() else 0.0
    return max(0.0, float(sizes[chosen].sum()) - usual * int(chosen.sum())) / total
