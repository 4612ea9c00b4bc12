"""Which side runs other weights than the model directory holds, by the captures' fingerprints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.captures.fingerprint import fingerprint

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
# what a checkpoint calls a layer's tensors, and the operator that reads them
_OPERATORS = (
    ("mlp.experts.", "experts"),
    ("mlp.gate.", "router"),
    ("norm", "norm"),
    ("_proj", "linear"),
)
_ENDS = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}

WEIGHTED = frozenset({"embedding", "norm", "linear", "router", "experts", "head"})
"""Operators that hold weights."""

Owner = tuple[int | None, str]
"""The layer and the operator that a weight belongs to."""


@dataclass(frozen=True, slots=True)
class WeightEvidence:
    """What the captured fingerprints say; each of them is of a sample of one tensor.

    ``different`` names, for each side, the tensors that the model directory has otherwise,
    ``compared`` counts those that could be compared, and ``shared`` names those that both sides
    have alike and the model directory otherwise.
    """

    different: Mapping[str, tuple[str, ...]]
    compared: Mapping[str, int]
    shared: tuple[str, ...]

    def owners(self, label: str) -> set[Owner]:
        """Say which operators read the tensors that only this side has otherwise."""
        return {owner(name) for name in self.different[label] if name not in self.shared}


def compare_weights(model: ReferenceModel, sides: tuple[Side, Side]) -> WeightEvidence:
    """Compare both captures' fingerprints with the model directory's tensors."""
    names = set(model.tensor_names())
    compared = {s.label: s.capture.info.fingerprints.keys() & names for s in sides}
    different = {
        s.label: tuple(n for n in sorted(compared[s.label]) if not _same(model, s, n))
        for s in sides
    }
    first, second = sides
    digests = [s.capture.info.fingerprints for s in sides]
    shared = [
        name
        for name in different[first.label]
        if name in different[second.label]
        # digests of two dtypes cannot be compared
        and (digests[0][name] == digests[1][name] or first.dtype != second.dtype)
    ]
    return WeightEvidence(different, {k: len(v) for k, v in compared.items()}, tuple(shared))


def owner(name: str) -> Owner:
    """Say which layer and operator read the checkpoint tensor ``name``."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return None, _ENDS.get(name.rpartition(".")[0], "weights")
    operator = next((op for part, op in _OPERATORS if part in found[2]), "weights")
    return int(found[1]), operator


def _same(model: ReferenceModel, side: Side, name: str) -> bool:
    digest, stored = side.capture.info.fingerprints[name], model.tensor(name)
    # an engine casts a checkpoint on loading, and may keep a router or a norm as it is or wider
    dtypes = dict.fromkeys((stored.dtype, getattr(torch, side.dtype), torch.float32))
    return any(digest == fingerprint(stored.to(dtype)) for dtype in dtypes)
