"""Simulated scores of two engines: a run's A, B and C with natural noise, and faults on them."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord

Columns = dict[str, NDArray[np.float64]]
Change = Callable[[Columns, np.random.Generator], Columns]


def run(
    seed: int = 0,
    *,
    change: Change | None = None,
    responses: int = 8,
    tokens: int = 128,
    noise: float = 0.004,
    step: int | None = None,
    digests: Mapping[str, str] | None = None,
    scoring: Mapping[str, Scoring] | None = None,
) -> ScoreRecord:
    """Make a record with A, B0, B1, C0 and C1, whose repeats are equal.

    ``change`` alters a response's columns. ``digests`` are those of the columns' weights, by their
    letter; ``scoring`` replaces how a column was obtained.
    """
    generator = np.random.default_rng(seed)
    calls = []
    for number in range(responses):
        scores = _noisy(generator, tokens, noise)
        if change is not None:
            scores = change(scores, generator)
        calls.append(
            Call.of(
                f"s{number}",
                generator.integers(0, 500, 20),
                generator.integers(0, 500, tokens),
                scores,
                group=f"p{number // 2}",
            )
        )
    columns = {
        name: (scoring or {}).get(name) or Scoring(worker="w", digest=(digests or {}).get(name[0]))
        for name in calls[0].scores
    }
    return ScoreRecord(RecordInfo(step=step, columns=columns), calls)


def below(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keep log-probs log-probs: what would be above 0 is mirrored."""
    return -np.abs(values)


def _noisy(generator: np.random.Generator, tokens: int, noise: float) -> Columns:
    exact = -generator.gamma(1.0, 1.2, tokens)

    def engine() -> NDArray[np.float64]:
        # heavy tails, and less noise where the model is sure
        error = generator.standard_t(3, tokens) * noise * (1 - np.exp(exact))
        return below(exact + error)

    a, b, c = engine(), engine(), engine()
    return {"A": a, "B0": b, "B1": b.copy(), "C0": c, "C1": c.copy()}
