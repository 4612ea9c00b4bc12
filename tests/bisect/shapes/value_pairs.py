"""Pairs of columns made from a real small model's scores, and what the tests say of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.table import CAUSES, SPREAD
from tests.bisect.scores.lab import Rollout, Sample, Scores
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
    second: str = "C0",
) -> PairSample:
    """A and ``second``, A at temperature ``a`` and C at ``c``, A's scores ``change``d.

    With C's entropy or without.
    """
    scores = run.scores(a=a, c=c, drawn=drawn)
    if change is not None:
        scores["A"] = [change(values.copy()) for values in scores["A"]]
    kept = {n: v for n, v in scores.items() if entropy or n != "C0.entropy"}
    return PairSample.of(list(record(run.samples, kept)), "A", second)


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


def half_sure(seed: int, noise: float, gain: float = 1.0, own: float = 0.0) -> Three:
    """16 x 192 tokens, half of them all but sure, as a trained model's are.

    Each engine has ``noise`` on its logits; C's are multiplied by ``gain``, with ``own`` noise.
    """
    random = np.random.default_rng(seed)
    samples: list[Sample] = []
    rows: tuple[list[torch.Tensor], ...] = ([], [], [])
    for number in range(16):
        broad = np.exp(random.normal(0.8, 0.5, 192))
        strength = np.where(random.random(192) < 0.5, random.uniform(6, 16, 192), broad)
        logits = random.normal(size=(192, 96)) * np.minimum(strength, 3)[:, None]
        logits[np.arange(192), random.integers(0, 96, 192)] += 1.5 * strength
        drawn = (logits + random.gumbel(size=logits.shape)).argmax(1)
        samples.append(Sample(f"{number}", (1,), tuple(drawn.tolist())))
        for engine, level in zip(rows, (noise, noise, noise + own), strict=True):
            amount = level * np.abs(random.standard_t(3, (192, 1)))
            held = logits * (gain if engine is rows[2] else 1.0)
            engine.append(torch.tensor(held + amount * random.normal(size=logits.shape)))
    return Three(Rollout(tuple(samples), tuple(rows[0]), tuple(rows[0])), rows[1], rows[2])
