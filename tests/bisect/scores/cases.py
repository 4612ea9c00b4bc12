"""Faults to be classed from scores, and sound runs in which nothing may be found.

Each case plants what the catalogue of real faults says: in the computation where the fault is in
one, and on the scores where it is bookkeeping. The makers know what is wrong; no record says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from layerbisect.captures.record.file import ScoreRecord
from tests.bisect.scores.faults_bookkeeping import BOOKKEEPING
from tests.bisect.scores.faults_engines import ENGINES
from tests.bisect.scores.faults_weights import WEIGHTS
from tests.bisect.scores.lab import Precision, before, score
from tests.bisect.scores.runs import Bench, Case, Family, Three, record, three

FAULTS: dict[str, Case] = {**BOOKKEEPING, **ENGINES, **WEIGHTS}


@dataclass(frozen=True, slots=True)
class Control:
    """A sound run, and the tolerance (nat) that it is judged with."""

    make: Callable[[Bench], list[ScoreRecord]]
    tolerance: float = 0.01


def clean(
    bench: Bench, family: Family = "dense", precision: Precision = "mixed", seed: int = 0
) -> ScoreRecord:
    """A record of three sound engines: A, B0, B1, C0, C1, and C0's entropy and logit."""
    return _kept(bench.sound(family, precision, seed))


def _kept(run: Three) -> ScoreRecord:
    return record(run.samples, run.scores())


def _bootstrapped(bench: Bench, seed: int) -> list[ScoreRecord]:
    """64 responses, drawn with replacement from 32 and cut at random."""
    run = bench.sound(samples=8)
    random = np.random.default_rng(seed)
    order = random.integers(0, len(run.samples), 64)
    scores = {column: [v[i] for i in order] for column, v in run.scores().items()}
    lengths = random.integers(16, 129, 64)
    samples = [
        replace(run.samples[i], response=run.samples[i].response[:n])
        for i, n in zip(order, lengths.tolist(), strict=True)
    ]
    cut = {c: [v[:n] for v, n in zip(vs, lengths, strict=True)] for c, vs in scores.items()}
    return [record(samples, cut)]


def _cut(bench: Bench, lengths: Sequence[int], family: Family = "dense") -> list[ScoreRecord]:
    return [_kept(bench.sound(family, seed=1).cut(lengths))]


def _with_tools(bench: Bench, unscored: bool) -> list[ScoreRecord]:
    """Stretches of each response are no tokens of the model's, and masked out."""
    run = bench.sound(seed=2)
    scores, masks = run.scores(), []
    for i in range(len(run.samples)):
        mask = np.ones(128, np.bool_)
        mask[20 + 5 * i : 44 + 5 * i] = False
        mask[100:] = i % 2 == 0
        masks.append(mask)
        for values in scores.values() if unscored else ():
            values[i][~mask] = np.nan
    return [record(run.samples, scores, masks=masks)]


def _warm(bench: Bench) -> list[ScoreRecord]:
    """A's prompts came from a sound prefix cache, in part."""
    run = bench.sound(seed=1)
    cached = [len(s.prompt) // 8 * 8 if i % 2 else 0 for i, s in enumerate(run.samples)]
    nothing = [0] * len(cached)
    return [record(run.samples, run.scores(), cached={"A": cached, "B0": nothing, "B1": nothing})]


def _at_temperature(bench: Bench, heat: float) -> list[ScoreRecord]:
    run = bench.heated(heat)
    scores = run.scores(a=heat, b=heat, c=heat)
    return [record(run.samples, scores, definition="temperature", temperature=heat)]


def _greedy(bench: Bench) -> list[ScoreRecord]:
    return [_kept(three(bench.lab(), seed=5, draw=lambda logits, ids: 1e4 * logits))]


def _filtered(bench: Bench) -> list[ScoreRecord]:
    """Drawn with top-k 8 and kept as raw scores on all sides, as it should be."""

    def best(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(logits < logits.topk(8, -1).values[:, -1:], -1e9)

    return [_kept(three(bench.lab(), seed=6, draw=best))]


def _repeating(bench: Bench) -> list[ScoreRecord]:
    """Responses that go round in circles."""

    def again(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        loop = torch.full_like(logits, -1e9).scatter(1, ids[:, -6:-5], 0.0)
        return loop if ids.shape[1] > 60 else logits

    return [_kept(three(bench.lab(), seed=7, draw=again))]


def _without(bench: Bench, *columns: str) -> list[ScoreRecord]:
    run = bench.sound(seed=1)
    scores = {c: values for c, values in run.scores().items() if c not in columns}
    return [record(run.samples, scores)]


def _same_path(bench: Bench) -> list[ScoreRecord]:
    """Deterministic inference: A and B are equal to the bit."""
    run = bench.sound("moe", seed=1)
    scores = run.scores()
    scores["A"] = [values.copy() for values in scores["B0"]]
    return [record(run.samples, scores)]


def _other_chunks(bench: Bench) -> list[ScoreRecord]:
    """The second replay was chunked otherwise, and rounds otherwise."""
    run = bench.sound("moe")
    scores = run.scores()
    other = bench.lab("moe").prefill(run.samples, chunk=48)
    scores["B1"] = [
        score(before(rows, s), s.response) for s, rows in zip(run.samples, other, strict=True)
    ]
    return [record(run.samples, scores)]


def _precise_trainer(bench: Bench) -> list[ScoreRecord]:
    """The trainer computes in float16, so that all rounding is the rollout's."""
    run = bench.sound()
    return [_kept(run.retrained(bench.lab(precision="float16").train(run.samples)))]


def _backward_only(bench: Bench) -> list[ScoreRecord]:
    """B067: the fault is in the backward, and C.grad is as good as C."""
    run = bench.sound(seed=2)
    scores = run.scores()
    scores["C.grad"] = [values.copy() for values in scores["C0"]]
    return [record(run.samples, scores)]


def _padding_leaks(bench: Bench) -> list[ScoreRecord]:
    """B069: padding gets a thousandth of attention, which scores cannot tell from rounding."""

    run = bench.sound()
    leaky = bench.lab().train_padded(run.samples, 8, shift=False, leak=-7.0)
    return [_kept(run.retrained(leaky))]


def _steps(bench: Bench) -> list[ScoreRecord]:
    runs = [bench.sound(seed=seed) for seed in range(3)]
    return [record(run.samples, run.scores(), step=step) for step, run in enumerate(runs)]


def _many_groups(bench: Bench) -> list[ScoreRecord]:
    return [_kept(bench.sound(count=16, samples=1))]


CONTROLS: dict[str, Control] = {
    "dense": Control(lambda bench: [clean(bench)]),
    "dense, other prompts": Control(lambda bench: [clean(bench, seed=1)]),
    "dense, yet others": Control(lambda bench: [clean(bench, seed=2)]),
    "mixture of experts": Control(lambda bench: [clean(bench, "moe")]),
    "mixture of experts, other prompts": Control(lambda bench: [clean(bench, "moe", seed=1)]),
    "float16": Control(lambda bench: [clean(bench, precision="float16")]),
    "float16, mixture of experts": Control(lambda bench: [clean(bench, "moe", "float16")]),
    "bfloat16 throughout": Control(lambda bench: [clean(bench, precision="bfloat16")], 0.02),
    "bfloat16 throughout, mixture of experts": Control(
        lambda bench: [clean(bench, "moe", "bfloat16")], 0.02
    ),
    "64 responses": Control(lambda bench: _bootstrapped(bench, 0)),
    "64 other responses": Control(lambda bench: _bootstrapped(bench, 1)),
    "short responses": Control(lambda bench: _cut(bench, [16, 18, 20, 22, 24, 26, 28, 30])),
    "ragged responses": Control(lambda bench: _cut(bench, [128, 16, 90, 40, 128, 77, 101, 33])),
    "very short responses": Control(lambda bench: _cut(bench, [1, 2, 3, 4, 5, 6, 7, 8], "moe")),
    "masked stretches": Control(lambda bench: _with_tools(bench, False)),
    "unscored stretches": Control(lambda bench: _with_tools(bench, True)),
    "warm prefix cache": Control(_warm),
    "temperature 0.7 on all sides": Control(lambda bench: _at_temperature(bench, 0.7)),
    "temperature 1.3 on all sides": Control(lambda bench: _at_temperature(bench, 1.3)),
    "greedy": Control(_greedy),
    "filtered, kept raw": Control(_filtered),
    "going round in circles": Control(_repeating),
    "no logits": Control(lambda bench: _without(bench, "C0.entropy", "C0.logit")),
    "no trainer": Control(lambda bench: _without(bench, "C0", "C1", "C0.entropy", "C0.logit")),
    "no repeats": Control(lambda bench: _without(bench, "B1", "C1")),
    "A and B equal": Control(_same_path),
    "repeats that round otherwise": Control(_other_chunks),
    "precise trainer": Control(_precise_trainer),
    "fault in the backward": Control(_backward_only),
    "padding leaks a thousandth": Control(_padding_leaks),
    "three steps": Control(_steps),
    "sixteen groups": Control(_many_groups),
}
