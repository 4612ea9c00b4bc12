"""How long an implementation takes on a GPU."""

from __future__ import annotations

import statistics

import torch

from layerbisect.kernels.replay.bench import Bench, OwnCall
from layerbisect.kernels.replay.variants import REFERENCE, Variant

WARM_UP = 5
RUNS = 30


def time_ms(bench: Bench, variant: Variant) -> float | None:
    """Median time (ms) of the variant's own calls, one after the other, on the whole bundle.

    By CUDA events, after a warm-up that compiles and tunes; what the low-precision reference fills
    in is not counted. None for that reference itself, and on a CPU, where kernels are interpreted.
    """
    if bench.device == "cpu" or variant.name == REFERENCE:
        return None
    calls: list[OwnCall] = []
    bench.run(variant, own_calls=calls)
    times: list[float] = []
    with torch.no_grad(), torch.cuda.device(bench.device):
        for run in range(WARM_UP + RUNS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for call, given in calls:
                variant.runs[call.operator](**given)
            end.record()
            end.synchronize()
            if run >= WARM_UP:
                times.append(start.elapsed_time(end))
    return statistics.median(times)
