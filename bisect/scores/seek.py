"""Seek shapes: run every test on every difference, on some of the calls where there are many."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from layerbisect.bisect.progress import Progress
from layerbisect.bisect.scores.report import Finding, PairReport
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.table import ALL, PAIRING
from layerbisect.captures.record.file import ScoreRecord

SAMPLED_TOKENS = 1 << 20
"""The tests see calls, evenly spread, of about so many tokens at most."""

WORST_CALLS = 32

Place = tuple[int, int]
"""A record's number, and a call's in it."""


class WorstCalls:
    """The calls with the largest mean differences, of any number."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, Place]] = []

    def add(self, mae: float, place: Place) -> None:
        """Take in a call's mean absolute difference (nat)."""
        if len(self._heap) < WORST_CALLS:
            heapq.heappush(self._heap, (mae, place))
        elif mae > self._heap[0][0]:
            heapq.heapreplace(self._heap, (mae, place))

    def places(self) -> tuple[Place, ...]:
        """The calls, in the order of the records."""
        return tuple(sorted(place for _, place in self._heap))


@dataclass(frozen=True, slots=True)
class Found:
    """What was found, the names of the tests that found nothing, and how many calls they saw."""

    findings: tuple[Finding, ...]
    silent: tuple[str, ...]
    sampled: int


def seek(
    records: Sequence[ScoreRecord],
    pairs: Sequence[PairReport],
    floors: Mapping[str, float],
    tokens: int,
    worst: Sequence[Place],
    progress: Progress,
) -> Found:
    """Run every test on every pair.

    Where there are more than SAMPLED_TOKENS, the tests see evenly spread calls, and those for
    mispaired responses see the worst calls beside them: a few of thousands would be missed.
    """
    every = [(number, index) for number, r in enumerate(records) for index in range(len(r))]
    sample = every[:: max(1, -(-tokens // SAMPLED_TOKENS))]
    found: dict[str, list[Finding]] = {name: [] for name in ALL}
    ticks = count(1)
    progress.start("seeking shapes", len(pairs) * len(ALL))

    def run(places: Sequence[Place], names: Iterable[str], tries: float) -> None:
        calls = [records[number][index] for number, index in places]
        for pair in pairs:
            noise = floors.get(pair.name, float("nan"))
            seen = PairSample.of(calls, pair.first, pair.second, noise=noise)
            for name in names:
                finding = ALL[name](seen)
                if finding is not None:
                    chance = min(1.0, finding.false_alarm * tries)
                    found[name].append(replace(finding, false_alarm=chance))
                progress.advance(next(ticks))

    run(sample, ALL, 1.0)
    if len(sample) < len(every):
        missed = [name for name in PAIRING if not found[name]]
        # the worst of so many are looked at
        run(sorted({*sample, *worst}), missed, len(every) / len(sample))
    progress.done()
    return Found(
        tuple(finding for findings in found.values() for finding in findings),
        tuple(name for name, findings in found.items() if not findings),
        len(sample),
    )
