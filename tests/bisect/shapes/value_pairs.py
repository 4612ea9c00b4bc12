"""Pairs of columns made from a real small model's scores, and what the tests say of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.table import CAUSES, SPREAD
from tests.bisect.scores.lab import Scores
from tests.bisect.scores.runs import Three, record

_OF_PLACES = ("shift", "chunk order", "swapped samples", "mispaired samples")
TESTS = [test for name, test in {**CAUSES, **SPREAD}.items() if name not in _OF_PLACES]

# chance of a false alarm at which the judge convicts
CONVICTS = 1e-6

Change = Callable[[Scores], Scores]


def pair(
    run: Three,
    *,
    a: float = 1.0,
    c: float = 1.0,
    drawn: bool = False,
    change: Change | None = None,
    entropy: bool = True,
) -> PairSample:
    """A-C0 at temperatures ``a`` and ``c``, A's scores ``change``d; with C's entropy or without."""
    scores = run.scores(a=a, c=c, drawn=drawn)
    if change is not None:
        scores["A"] = [change(values.copy()) for values in scores["A"]]
    kept = {n: v for n, v in scores.items() if entropy or n != "C0.entropy"}
    return PairSample.of(list(record(run.samples, kept)), "A", "C0")


def found(sample: PairSample) -> dict[str, Finding]:
    """What the tests find, by the test's name."""
    return {f.test: f for f in (test(sample) for test in TESTS) if f is not None}


def convicted(sample: PairSample) -> set[str]:
    """Names of the tests that convict; those that only describe left out."""
    describing = {"one-sidedness", "a few tokens against all"}
    return {n for n, f in found(sample).items() if f.false_alarm <= CONVICTS} - describing


def from_place(offset: float, place: int) -> Change:
    """Add ``offset`` from response position ``place`` on."""

    def change(scores: Scores) -> Scores:
        changed: Scores = scores + offset * (np.arange(len(scores)) >= place)
        return changed

    return change
