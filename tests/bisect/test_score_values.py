"""What the tests for shapes of values find in a real small model's scores, and leave alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layerbisect.bisect.score_report import Finding
from layerbisect.bisect.score_sample import PairSample
from layerbisect.bisect.score_values import TESTS
from layerbisect.captures.record import Call
from tests.bisect.score_lab import Lab, Rollout, Scores, before, entropy, prompts, score

Columns = dict[str, list[Scores]]


class Run:
    """One rollout and its trainer, and samples of scores made from their logits."""

    def __init__(self, lab: Lab, seed: int = 0) -> None:
        self.rollout: Rollout = lab.generate(prompts(seed), seed=seed)
        samples = self.rollout.samples
        self.trained = [
            before(r, s) for r, s in zip(lab.train(samples), samples, strict=True)
        ]

    def a(self, temperature: float = 1.0) -> list[Scores]:
        pairs = zip(self.rollout.raw, self.rollout.samples, strict=True)
        return [score(rows, sample.response, temperature) for rows, sample in pairs]

    def c(self, temperature: float = 1.0) -> list[Scores]:
        pairs = zip(self.trained, self.rollout.samples, strict=True)
        return [score(rows, sample.response, temperature) for rows, sample in pairs]

    def sample(
        self, a: list[Scores], c: list[Scores] | None = None, *, of: float | None = None
    ) -> PairSample:
        """A-C0; with C's entropy at temperature ``of`` where one is given."""
        columns: Columns = {"A": a, "C0": self.c() if c is None else c}
        if of is not None:
            columns["C0.entropy"] = [entropy(rows, of) for rows in self.trained]
        calls = [
            Call.of(f"{i}", s.prompt, s.response, {n: v[i] for n, v in columns.items()})
            for i, s in enumerate(self.rollout.samples)
        ]
        return PairSample.of(calls, "A", "C0")


def found(sample: PairSample) -> dict[str, Finding]:
    return {f.test: f for f in (test(sample) for test in TESTS) if f is not None}


@pytest.fixture(scope="module")
def run(small_qwen3_dir: Path) -> Run:
    return Run(Lab(small_qwen3_dir, "bfloat16"))


def test_nothing_in_a_clean_pair(run: Run) -> None:
    assert found(run.sample(run.a(), of=1.0)) == {}


def test_an_offset_from_position_one_on(run: Run) -> None:
    a = [scores - 0.1 * (np.arange(len(scores)) > 0) for scores in run.a()]
    finding = found(run.sample(a))["constant offset"]
    assert "A is lower than C0 by 0.100 nat" in finding.summary
    assert finding.where == "response positions >= 1"
    assert finding.false_alarm < 1e-6


@pytest.mark.parametrize("temperature", [0.6, 0.8, 0.9])
def test_a_temperature(run: Run, temperature: float) -> None:
    sample = run.sample(run.a(), run.c(temperature), of=temperature)
    finding = found(sample)["temperature"]
    assert f"C0 is of logits divided by {temperature:.2f}" in finding.summary
    assert finding.false_alarm < 1e-6
