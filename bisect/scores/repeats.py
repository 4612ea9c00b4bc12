"""Repeats: does scoring the same tokens again, with nothing changed, give the same scores?"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Literal

import numpy as np

from layerbisect.bisect.scores.measure import WorstTokens
from layerbisect.bisect.scores.report import RepeatKind, RepeatReport
from layerbisect.captures.record.call import Call, Scoring, replays

MOVED = 20
"""So many tokens that moved are named."""


class RepeatMeasure:
    """Compares every two repeats of ``letter``, apart by what they share."""

    def __init__(
        self, letter: Literal["B", "C"], columns: Mapping[str, Scoring], tolerance: float
    ) -> None:
        """``tolerance`` (nat) is how far a token's repeats may differ before it has moved."""
        self.letter = letter
        self.tolerance = tolerance
        self._pairs: dict[RepeatKind, list[tuple[str, str]]] = {}
        for pair in combinations(replays(columns, letter), 2):
            kind = _kind(letter, columns[pair[0]], columns[pair[1]])
            self._pairs.setdefault(kind, []).append(pair)
        self._sum = dict.fromkeys(self._pairs, 0.0)
        self._count = dict.fromkeys(self._pairs, 0)
        self._max = dict.fromkeys(self._pairs, 0.0)
        self._moved = dict.fromkeys(self._pairs, 0)
        self._worst = {kind: WorstTokens(MOVED) for kind in self._pairs}

    def add(self, call: Call) -> None:
        """Take in a call."""
        for kind, pairs in self._pairs.items():
            furthest = np.zeros(len(call.response))
            widest = [np.zeros(len(call.response)), np.zeros(len(call.response))]
            for first, second in pairs:
                one, other = call.scores[first], call.scores[second]
                size = np.where(call.mask, np.abs(one - other), 0.0)
                size[np.isnan(size)] = 0.0
                self._sum[kind] += float(size.sum())
                self._count[kind] += int((call.mask & np.isfinite(one) & np.isfinite(other)).sum())
                wider = size > furthest
                furthest[wider] = size[wider]
                widest[0][wider], widest[1][wider] = one[wider], other[wider]
            self._max[kind] = max(self._max[kind], float(furthest.max()))
            moved = np.flatnonzero(furthest > self.tolerance)
            self._moved[kind] += len(moved)
            self._worst[kind].add(call, widest[0], widest[1], moved)

    def reports(self) -> tuple[RepeatReport, ...]:
        """Summarize; empty where there is one pass or none."""
        return tuple(
            RepeatReport(
                letter=self.letter,
                kind=kind,
                pairs=tuple(f"{first}-{second}" for first, second in pairs),
                mae=self._sum[kind] / self._count[kind],
                max=self._max[kind],
                tolerance=self.tolerance,
                moved_tokens=self._moved[kind],
                moved=self._worst[kind].listed(),
            )
            for kind, pairs in self._pairs.items()
            if self._count[kind]
        )


def _kind(letter: str, first: Scoring, second: Scoring) -> RepeatKind:
    if letter == "C":
        return "trainer"
    if first.through or second.through:
        return "router"
    return "one worker" if first.worker == second.worker else "workers"
