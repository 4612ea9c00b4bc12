"""All faults, controls and reports, from the modules that plant them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scripts.planted import (
    attention,
    batching,
    cache,
    controls,
    decode_attention,
    experts,
    heads,
    masks,
    norms,
    rope,
    router,
    scores,
    topk,
    weights,
)
from scripts.planted.fault import Control, ModelFault, ScoreFault

MODULES: tuple[Any, ...] = (
    norms,
    weights,
    heads,
    masks,
    attention,
    cache,
    rope,
    batching,
    router,
    topk,
    experts,
    scores,
    controls,
    decode_attention,
)


def _all(name: str, kind: type | tuple[type, ...]) -> Iterable[Any]:
    return (one for module in MODULES for one in getattr(module, name, ()) if isinstance(one, kind))


MODEL_FAULTS: tuple[ModelFault, ...] = tuple(_all("FAULTS", ModelFault))
SCORE_FAULTS: tuple[ScoreFault, ...] = tuple(_all("FAULTS", ScoreFault))
CONTROLS: tuple[Control, ...] = tuple(_all("CONTROLS", Control))
EVERYTHING: tuple[ModelFault | ScoreFault | Control, ...] = (
    *MODEL_FAULTS,
    *SCORE_FAULTS,
    *CONTROLS,
)
NOT_PLANTED: dict[str, str] = {
    source: why for module in MODULES for source, why in getattr(module, "NOT_PLANTED", {}).items()
}
