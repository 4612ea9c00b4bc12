"""Which passes of an SGLang server are replayed from CUDA graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from layerbisect.doctor.arguments import Settings
from layerbisect.doctor.check import Check
from layerbisect.doctor.rules import Finding

_NO_GRAPHS = "--disable-cuda-graph"
_FIELDS = ("cuda_graph_backend_decode", "cuda_graph_backend_prefill", "cuda_graph_config")


def graphs(settings: Settings) -> Iterator[Finding]:
    """Say which passes run from a graph, in which no point is seen."""
    name = "CUDA graphs"
    live = {phase: how for phase, how in _backends(settings).items() if how != "disabled"}
    if not live:
        yield Finding(Check(name, "ok", "off", tried=str(settings.get("device")) == "cpu"))
        return
    said = [settings.say(f) for f in _FIELDS if f in settings.told]
    found = ", ".join(f"{phase} {how}" for phase, how in live.items())
    if said:
        found += f" ({', '.join(said)})"
    elif not settings.whole:
        found = f"by default decode full and, on CUDA, prefill breakable: no {_NO_GRAPHS}"
    effect = (
        f"a replayed graph calls no hooks: points inside {' and '.join(live)} passes are told as "
        "not seen; log-probs still are"
    )
    advice = f"{_NO_GRAPHS} (newer: --cuda-graph-backend-decode and -prefill disabled)"
    check = Check(name, "problem", found, advice, effect, tried=False)
    yield Finding(check, (_NO_GRAPHS,), _FIELDS)


def _backends(settings: Settings) -> dict[str, str]:
    """Which graphs a phase runs from, with SGLang's own order of precedence."""
    found = {"decode": "full", "prefill": "breakable"}
    if settings.get("device") == "cpu":
        # SGLang makes none there but with torch.compile, which is told by itself
        found = dict.fromkeys(found, "disabled")
    config = _config(settings.get("cuda_graph_config"))
    for phase in found:
        if settings.get("disable_cuda_graph") or settings.get(f"disable_{phase}_cuda_graph"):
            found[phase] = "disabled"
        found[phase] = str(settings.get(f"cuda_graph_backend_{phase}", found[phase]))
        told = config.get(phase)
        if isinstance(told, dict) and told.get("backend"):
            found[phase] = str(told["backend"])
    return found


def _config(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}
