"""What the accuracy benchmark plants, and the truth that a verdict on it is held against.

A *fault* changes one side of a pair of engines. Most change a module of the model (`ModelFault`),
some only what is recorded of its scores (`ScoreFault`). A *control* (`Control`) changes what may
only round differently: accusing anybody of it is an error. What tells them apart never reaches the
locator, which is given two captures, a record and a model directory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Form = Callable[[Any, int], AbstractContextManager[None]]
"""From a transformers causal language model and a layer's number to the context in which the fault
is there. Raises LayerBisectError where the model cannot have it."""

Side = Literal["rollout", "trainer"]
SIDES: tuple[Side, Side] = ("rollout", "trainer")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Truth:
    """What a verdict must say of one planted fault; ``layer`` is None for what is no layer's.

    ``where`` is a regular expression that the culprit's ``where`` or evidence must hold, "" where
    the fault is everywhere in its operator.
    """

    layer: int | None
    operator: str
    side: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class ModelFault:
    """A fault in the model's own computation.

    Attributes:
        name: its own name, such as ``mask-sees-the-next-token``.
        component: what the reports call the place: ``mask``, ``kv_prefix_cache``, ...
        operator: the verdict's word for the operator that errs, where the layer has experts.
        point: suffix of the first point that comes out wrong (``attn.context``), or a point of no
            layer (``embed``, ``final_norm``, ``logits``).
        form: how it is planted.
        reports: the public issues it is a reading of, ``owner/repository#number``.
        description: one sentence.
        dense: the operator where the layer has no experts; "" where it is the same, None where the
            fault needs experts.
        layers: ``each`` for a fault of one layer, ``all`` for one of every layer at once, ``none``
            for what is no layer's. The form of the last two ignores the layer's number.
        passes: which of the rollout's passes have it; a fault of one pass is planted on that side.
        sides: where it makes sense.
        where: as in `Truth`.
        dtypes: in which it is a fault; elsewhere it is within what the dtype rounds.
        changes: the least share of rows at ``point`` that it changes; for the test of its truth.
        tied_only: whether it needs a head that shares the embedding's weights.
    """

    name: str
    component: str
    operator: str
    point: str
    form: Form
    reports: tuple[str, ...]
    description: str
    dense: str | None = ""
    layers: Literal["each", "all", "none"] = "each"
    passes: Literal["both", "decode", "prefill"] = "both"
    sides: tuple[Side, ...] = SIDES
    where: str = ""
    dtypes: tuple[str, ...] = DTYPES
    changes: float = 0.0
    tied_only: bool = False

    def truth(self, layer: int, side: Side, *, sparse: bool) -> Truth:
        """What a verdict must say of it in one layer, which has experts or not."""
        operator = self.operator if sparse or not self.dense else self.dense
        return Truth(layer if self.layers == "each" else None, operator, side, self.where)

    def point_in(self, layer: int) -> str:
        """Full name of the first wrong point."""
        if self.layers == "none":
            return self.point
        return f"layers.{0 if self.layers == 'all' else layer}.{self.point}"


@dataclass(slots=True)
class Scored:
    """What was scored of the responses of one case; a `ScoreFault` changes it in place.

    ``scores`` maps the columns A, B0, B1, C0 and C1 to one float64 [response] a call, in nats.
    ``logits`` maps a side to one float32 [response, vocab] a call, the raw logits that each
    response token was scored with; ``tokens`` and ``prompts`` are int64 a call.
    """

    scores: dict[str, list[NDArray[np.float64]]]
    logits: Mapping[Side, Sequence[torch.Tensor]]
    prompts: Sequence[NDArray[np.int64]]
    tokens: Sequence[NDArray[np.int64]]
    definition: dict[str, str]


@dataclass(frozen=True, slots=True)
class ScoreFault:
    """A fault between a model's log-probs and the record of them; the model itself is right.

    ``columns`` are those that it changes, all of one side. ``operator`` is ``logprob`` or
    ``inputs``.
    """

    name: str
    component: str
    operator: str
    columns: tuple[str, ...]
    change: Callable[[Scored], None]
    reports: tuple[str, ...]
    description: str
    where: str = ""

    def truth(self) -> Truth:
        """What a verdict must say of it."""
        side = "trainer" if self.columns[0].startswith("C") else "rollout"
        return Truth(None, self.operator, side, self.where)


@dataclass(frozen=True, slots=True)
class Control:
    """A harmless difference of one side: a form as of a `ModelFault`, or another layout.

    ``layout`` is how that side runs the sequences: ``single``, ``padded``, ``packed``, ``chunked
    prefill``, ``decode`` or ``batched decode``; ``settings`` are the engine's own
    (``attention``, ``experts``). ``dtype`` is the side's where it is another than the pair's.
    """

    name: str
    description: str
    reports: tuple[str, ...] = ()
    form: Form | None = None
    layout: str = "single"
    settings: Mapping[str, str] | None = None
    dtype: str | None = None
    dtypes: tuple[str, ...] = DTYPES
    moe_only: bool = False


def held_out(name: str) -> bool:
    """Whether a fault is among the quarter that is kept aside while the method is tuned.

    Whole faults are kept aside, in all their layers, sides and models: it goes by the name alone.
    """
    return hashlib.sha256(name.encode()).digest()[0] % 4 == 0
