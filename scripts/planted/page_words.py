"""The words of docs/accuracy.md that are not counted: what was done, and why misses were missed."""

from __future__ import annotations

import re

from scripts.planted.figures import Result

INTRO = """# Is the verdict right?

Written by `python -m scripts.accuracy page`, from what `python -m scripts.accuracy run` and
`python -m scripts.planted.engines` left in a work directory. Faults that people reported are
planted in one side of a pair of real engines, and the locator has to name layer, operator and side.

The locator is a process of its own. It is told a folder with two captures, a record of A, B and C
and a checkpoint; the folder's name is a number, and the truth is in another process. A quarter of
the faults, chosen by a hash of their names, was kept aside while the method was tuned: whole
faults, in all their places. The two figures stand side by side.

Engines: two implementations in transformers (eager attention and experts against SDPA and grouped
GEMM) in all cases, and a real SGLang server against the real megatron-core in some. Models: a tiny
Qwen3-MoE with random weights (6 layers, 8 experts), and SmolLM2-135M, dense, with its massive
activations. What is simulated: the faults, each a change to one module of a running engine, or to
the record. Each is one reading of a report, not the reported program. Everything ran on a CPU."""

HOW = """## How to run it again

```
python -m scripts.accuracy run --work DIR
python -m scripts.planted.engines --work DIR/engines
python -m scripts.accuracy engines --work DIR
python -m scripts.accuracy page --work DIR --page docs/accuracy.md
```

`run` goes on where it was stopped; `--part tuning` leaves the faults kept aside alone. A case is
right only if the culprits are exactly what was planted: one too many counts as wrong."""

EXPLAINED: dict[int, str] = {}
"""Reasons, by the number that the table of misses gives."""

_WHY: tuple[tuple[str, int], ...] = ()
"""Which reason a miss has: a regular expression on its name, and the reason's number."""


def explanation(result: Result) -> str:
    """The number of a miss's reason, where it is known."""
    for pattern, number in _WHY:
        if re.search(pattern, result.id):
            return str(number)
    return "not explained"
