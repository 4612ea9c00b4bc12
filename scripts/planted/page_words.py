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

EXPLAINED: dict[int, str] = {
    1: "A weight of 1e4 makes router logits so large that all softmax scores but the first are 0 "
    "in float32, and a choice among zeros is no order. The verdict blamed that choice beside the "
    "norm. Mended after these faults had been judged.",
    2: "Cosine and sine that are all too small by one factor make queries and keys too small by "
    "it, as weights of q/k norms would. Mended after these faults had been judged: one factor of "
    "queries and keys alike is the rotary embedding's.",
    3: "Scores that nobody made are left out by the mask, and too few are left to judge: the "
    "verdict is inconclusive and says so.",
    4: "The record calls all columns scores over a temperature, and captures hold raw ones: "
    "neither side's can be computed from them, and A and B agree. The verdict accuses nobody.",
    5: "Repeats of B differ, and repeats come before everything: the verdict is unstable, and "
    "names the tokens that moved.",
    6: "The residual stream grows with depth, and beyond the first layers the wrong eps is within "
    "rounding: the verdict names the layers in which it shows, and cannot know that it is in all.",
    7: "Norms that compute in bfloat16 in a float32 model leave its rounding in queries and keys, "
    "which neither a rotation nor a norm explains: the verdict names the projection beside the "
    "norms.",
    8: "Two faults in a row: what the first one leaves (weights of 1e4) hides the second one.",
}
"""Reasons, by the number that the table of misses gives."""

_WHY: tuple[tuple[str, int], ...] = (
    ("weights-on-experts-input.*mlp-norm-uninitialised", 8),
    ("mlp-norm-uninitialised", 1),
    ("norms-in-bfloat16", 7),
    ("rope-attention-factor-of-one", 2),
    ("logprobs-first-alone", 3),
    ("temperature-after-softmax", 4),
    ("cached-logprobs-stale", 5),
    ("SmolLM2.*(every-norm-eps|mlp-norms-eps)", 6),
)
"""Which reason a miss has: a regular expression on its name, and the reason's number."""


def explanation(result: Result) -> str:
    """The number of a miss's reason, where it is known."""
    for pattern, number in _WHY:
        if re.search(pattern, result.id):
            return str(number)
    return "not explained"
