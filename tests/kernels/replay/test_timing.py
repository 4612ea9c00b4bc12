"""Times on a GPU, by a clock that a test winds: there is none here."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch

from layerbisect.kernels.replay import timing
from layerbisect.kernels.replay.bench import Bench, OwnCall
from layerbisect.kernels.replay.bundle import Call
from layerbisect.kernels.replay.variants import Variant

CALL = Call("linear", {"x": "x", "weight": "w"}, ("y",))


class _Bench:
    device = "cuda"

    def run(self, variant: Variant, *, own_calls: list[OwnCall]) -> None:
        own_calls += [(CALL, {"x": 1}), (CALL, {"x": 2})]


def test_the_median_of_runs_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ran = [0.0], []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    def run(x: int) -> None:
        ran.append(x)
        # the first runs compile; one later run is disturbed
        clock[0] += 1000 if len(ran) <= 2 * timing.WARM_UP or len(ran) == 41 else 0.5 * x

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    variant = Variant("v", "p", "fast", "", {"linear": run})
    assert timing.time_ms(cast(Bench, _Bench()), variant) == 1.5
    assert ran == [1, 2] * (timing.WARM_UP + timing.RUNS)


def test_none_on_a_cpu() -> None:
    bench = _Bench()
    bench.device = "cpu"
    assert timing.time_ms(cast(Bench, bench), Variant("v", "p", "fast", "", {})) is None
