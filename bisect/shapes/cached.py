"""Gaps that go with a cached prefix: at its end, or in the calls that have one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.chance import log_choose, log_normal_tail, normal_ranks
from layerbisect.bisect.shapes.gaps import (
    ALLOWED,
    NATURAL,
    RAISED,
    Bools,
    Gaps,
    Ints,
    chance,
    explained,
    log_set_chance,
)
from layerbisect.bisect.shapes.responses import levels, log_apart
from layerbisect.bisect.shapes.sample import PairSample

# how many times larger than without a cached prefix
_RATIO = 5.0
_MOST = 0.75
# nat: attention over a cached prefix may round otherwise, by less than this
_MATTERS = 0.03


def cached_prefix(sample: PairSample) -> Finding | None:
    """Find a gap inside or after a cached prefix, in calls that have one, or growing with it."""
    gaps = Gaps.distinct(sample)
    if gaps is None:
        return None
    found = [*_at_its_end(sample, gaps), *_with_one(sample, gaps)]
    best = min(found, key=lambda f: f.false_alarm, default=None)
    return best if best is not None and best.false_alarm <= math.exp(RAISED) else None


def _sides(sample: PairSample) -> Iterator[tuple[str, Ints]]:
    for name, cached in (
        (sample.first_name, sample.cached_first),
        (sample.second_name, sample.cached_second),
    ):
        if (cached > 0).any():
            yield name, cached


def _finding(
    sample: PairSample, gaps: Gaps, chosen: Bools, log: float, where: str, *evidence: str
) -> Finding:
    here = float(np.abs(gaps.d[chosen]).mean())
    rest = "" if chosen.all() else f", elsewhere {np.abs(gaps.d[~chosen]).mean():.4f}"
    return Finding(
        test="cached prefix",
        pair=sample.name,
        side=None,
        summary=f"{where}: {here:.4f} nat apart{rest}",
        evidence=evidence,
        false_alarm=chance(log),
        explains=explained(gaps, chosen),
        tokens=int(chosen.sum()),
        mae=here,
        where=where,
    )


def _at_its_end(sample: PairSample, gaps: Gaps) -> Iterator[Finding]:
    """Where the cached prefix ends inside the response, tokens before or after may be apart."""
    for name, cached in _sides(sample):
        inside = gaps.position < cached[gaps.call]
        places = (
            (inside, f"positions inside the cached prefix of {name}"),
            (
                ~inside & (cached > sample.prompt_lengths)[gaps.call],
                f"positions after the cached prefix of {name}",
            ),
        )
        for (chosen, where), kept in product(places, gaps.views()):
            seen, rest = kept & chosen, kept & ~chosen
            if not seen.any() or not inside.any() or not rest.any():
                continue
            if not gaps.all_moved(kept, chosen):
                continue
            usual = float(np.median(gaps.relative[rest]))
            high = float(np.mean(gaps.relative[seen] > ALLOWED * usual))
            if high < _MOST:
                continue
            log = log_set_chance(gaps.only(kept), chosen[kept]) + math.log(8)
            yield _finding(
                sample,
                gaps,
                chosen,
                log,
                where,
                f"{high:.0%} of {seen.sum()} tokens that tell there are more than {ALLOWED:g} "
                "times as far apart as usual ones",
            )


def _with_one(sample: PairSample, gaps: Gaps) -> Iterator[Finding]:
    """Calls with a cached prefix may be apart while those without aren't, the more the longer.

    The chance is that of calls standing apart, and that of their being the ones with a prefix.
    """
    level = levels(gaps)
    calls, mean = level.calls, level.mean
    if not len(calls):
        return
    for name, cached in _sides(sample):
        mine = cached[calls]
        if (mine < 0).any():
            continue
        has = mine > 0
        chosen = np.isin(gaps.call, calls[has])
        if has.any() and not has.all() and level.median[has].min() > level.median[~has].max():
            ratio = float(np.median(level.median[has]) / np.median(level.median[~has]))
            if ratio >= _RATIO and float(mean[has].mean()) >= _MATTERS:
                match = -log_choose(len(has), int(has.sum())) + math.log(4)
                yield _finding(
                    sample,
                    gaps,
                    chosen,
                    log_apart(level, has, sample.prompt[calls]) + match,
                    f"calls with a cached prefix in {name}",
                    f"all {has.sum()} calls with one are further apart than all {(~has).sum()} "
                    f"without, {ratio:.0f} times by their medians",
                    f"calls that stand apart for another reason match by chance: "
                    f"{chance(match):.1e}",
                )
        # the samples of a prompt share its cached length: together they are one draw
        _, own = np.unique(sample.prompt[calls], return_inverse=True)
        each = np.bincount(own)
        lengths, heights = (np.bincount(own, values) / each for values in (mine, level.median))
        if len(np.unique(lengths)) >= len(each) / 2 and len(each) >= 8:
            correlation = float(np.mean(normal_ranks(lengths) * normal_ranks(heights)))
            if correlation > 0.8 and float(mean.mean()) >= NATURAL:
                z = math.atanh(min(correlation, 1 - 1e-9)) * math.sqrt(len(each) - 3)
                yield _finding(
                    sample,
                    gaps,
                    chosen if not has.all() else np.ones(len(gaps.d), bool),
                    log_normal_tail(z) + math.log(4),
                    f"calls with a long cached prefix in {name}",
                    f"rank correlation of its length with the gap {correlation:.2f} over "
                    f"{len(each)} prompts",
                )
