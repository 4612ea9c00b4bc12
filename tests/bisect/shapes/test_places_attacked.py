"""What misled the tests for places: samples of calls, short responses, copies, sure tokens."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.table import ALL
from layerbisect.captures.record.call import Call


def seen(first: list[NDArray[np.float64]], second: list[NDArray[np.float64]]) -> PairSample:
    """Every other call of those that were recorded, as where many are sampled."""
    calls = [
        Call.of(f"call {i}", [i], [7] * len(a), {"A": a, "B0": b})
        for i, (a, b) in enumerate(zip(first, second, strict=True))
    ]
    return PairSample.of(calls[::2], "A", "B0")


@pytest.mark.parametrize("name", ["swapped samples", "some responses", "a few tokens against all"])
def test_responses_are_called_by_name_whichever_calls_are_seen(name: str) -> None:
    random = np.random.default_rng(0)
    second = [-random.exponential(1.0, 16 if i == 8 else 64) for i in range(24)]
    first = [scores + random.normal(0.0, 0.001, len(scores)) for scores in second]
    if name == "swapped samples":
        first[4], first[10] = first[10], first[4]
    else:
        wrong, apart = (8, 4.0) if name.startswith("a few") else (4, 0.2)
        first[wrong] += random.normal(0.0, apart, len(first[wrong]))
    finding = ALL[name](seen(first, second))
    assert finding is not None
    assert {
        "swapped samples": "responses call 4, call 10",
        "some responses": "response call 4",
        "a few tokens against all": "stand in response call 8",
    }[name] == finding.where
    if name == "swapped samples":
        assert finding.evidence[0] == "call 4 holds call 10, call 10 holds call 4"
