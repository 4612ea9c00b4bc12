"""The locator of the accuracy benchmark, in a process of its own: what it is asked is all it knows.

Reads one case's folder a line from standard input, and writes one line of JSON for each. A folder
holds ``rollout`` and ``trainer`` (captures), ``record.safetensors`` (where there is one),
``model``, a link to the checkpoint, and of a server's capture ``sides.json`` with the pattern of
its requests; nothing in it, its name included, says what was planted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from scripts.planted.rules import profile


def locate(case: Path) -> dict[str, Any]:
    """Judge one case: the verdict's answer, and what simpler rules have to go by."""
    record = case / "record.safetensors"
    told = case / "sides.json"
    options = json.loads(told.read_text()) if told.exists() else {"rollout": {}, "trainer": {}}
    sides = [Capture.open(case / side, **options[side]) for side in ("rollout", "trainer")]
    start = time.perf_counter()
    try:
        verdict = bisect(
            *sides,
            model=(case / "model").resolve(),
            record=record if record.exists() else None,
        )
    except LayerBisectError as error:
        answer: dict[str, Any] = {"status": "refused", "reasons": [str(error)], "culprits": []}
    else:
        answer = _answer(verdict)
    answer["seconds"] = time.perf_counter() - start
    answer["rules"] = profile(*sides)
    return answer


def _answer(verdict: Verdict) -> dict[str, Any]:
    data = verdict.to_json()
    kept = ("status", "reasons", "culprits", "gap", "sensitivity")
    return {name: data[name] for name in kept if name in data} | {
        "forwards": verdict.probe.forwards if verdict.probe else 0,
        "predicted_gap": verdict.rounding_budget.predicted_gap if verdict.rounding_budget else None,
    }


def main() -> None:
    """Answer until standard input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(locate(Path(line.strip()))), flush=True)


if __name__ == "__main__":
    main()
