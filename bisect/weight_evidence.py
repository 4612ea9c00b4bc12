"""Which side runs other weights than the model directory holds, by the captures' fingerprints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.bisect.verdict import OTHER_WEIGHTS, Culprit
from layerbisect.captures.fingerprint import fingerprint
from layerbisect.captures.weight_states import WeightFinding

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
# what a checkpoint calls a layer's tensors, and the operator that reads them
_OPERATORS = (
    ("mlp.experts.", "experts"),
    ("mlp.gate.", "router"),
    ("norm", "norm"),
    ("_proj", "linear"),
)
# pairs of ranks that are named in a culprit's evidence
_RANKS = 3
_ENDS = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}

WEIGHTED = frozenset({"embedding", "norm", "linear", "router", "experts", "head"})
"""Operators that hold weights."""

Owner = tuple[int | None, str]
"""The layer and the operator that a weight belongs to."""


@dataclass(frozen=True, slots=True)
class WeightEvidence:
    """What the captured fingerprints say; each of them is of a sample of one tensor.

    ``different`` names, for each side, the tensors that the model directory has otherwise,
    ``compared`` counts those that could be compared, of ``total`` that the model directory has,
    and ``shared`` names those that both sides have alike and the model directory otherwise.
    ``torn`` names the tensors of which a side's own ranks hold different values, and ``ranks`` says
    so in sentences. ``tied`` says that the head reads the embedding's table.
    """

    different: Mapping[str, tuple[str, ...]]
    compared: Mapping[str, int]
    total: int
    shared: tuple[str, ...]
    torn: Mapping[str, tuple[str, ...]]
    ranks: Mapping[str, tuple[str, ...]]
    tied: bool

    def owners(self, label: str) -> set[Owner]:
        """Say which operators read the tensors that only this side, or a rank, has otherwise."""
        return {owner(name) for name in (*self.off(label), *self.torn[label])}

    def off(self, label: str) -> list[str]:
        """Name the tensors that this side alone has otherwise than the model directory."""
        return [name for name in self.different[label] if name not in self.shared]

    def behind(self, culprit: Culprit) -> dict[str, list[str]]:
        """Name, for each side that errs, the tensors of a culprit that are known to differ."""
        every = culprit.layer is None and culprit.point.startswith("layers.*")
        found = {}
        for label, names in self.different.items():
            own = [
                name
                for name in names
                if (place := owner(name))[0] == culprit.layer or (every and place[0] is not None)
                if culprit.operator in (place[1], None)
            ]
            if own and culprit.side in (label, "both"):
                found[label] = own
        return found

    def told(self, culprit: Culprit) -> Culprit:
        """Say first of a culprit that its weights are known to differ, where they are."""
        lines = [
            ("" if culprit.side == label else f"{label}: ")
            + f"{OTHER_WEIGHTS}: "
            + ", ".join(names[:3])
            + (f" and {len(names) - 3} more" if names[3:] else "")
            for label, names in self.behind(culprit).items()
        ]
        return replace(culprit, evidence=(*lines, *culprit.evidence)) if lines else culprit


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
    findings = {s.label: s.capture.weight_findings for s in sides}
    return WeightEvidence(
        different=different,
        compared={k: len(v) for k, v in compared.items()},
        total=len(names),
        shared=tuple(shared),
        torn={
            label: tuple(dict.fromkeys(name for one in found for name in one.names))
            for label, found in findings.items()
        },
        ranks={
            s.label: (
                *(_ranks(model, s, one, names) for one in findings[s.label][:_RANKS]),
                *_more(len(findings[s.label]) - _RANKS),
            )
            for s in sides
        },
        tied=model.config.tied,
    )


def owner(name: str) -> Owner:
    """Say which layer and operator read the checkpoint tensor ``name``."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return None, _ENDS.get(name.rpartition(".")[0], "weights")
    operator = next((op for part, op in _OPERATORS if part in found[2]), "weights")
    return int(found[1]), operator


def _more(count: int) -> list[str]:
    return [f"and {count} more pairs of ranks that differ"] if count > 0 else []


def _ranks(model: ReferenceModel, side: Side, found: WeightFinding, known: Iterable[str]) -> str:
    """Say which ranks hold different values of which tensors, and which of them are right."""
    right = [
        rank
        for which, rank in enumerate(found.ranks)
        if all(
            name in known and _is(model, side, name, digests[which])
            for name, digests in found.digests.items()
        )
    ]
    return f"{found}" + (f"; {right[0]} has those of the model directory" if right else "")


def _same(model: ReferenceModel, side: Side, name: str) -> bool:
    return _is(model, side, name, side.capture.info.fingerprints[name])


def _is(model: ReferenceModel, side: Side, name: str, digest: str) -> bool:
    """Whether a digest is that of the model directory's tensor, in a dtype that it is held in."""
    stored = model.tensor(name)
    # an engine casts a checkpoint on loading, and may keep a router or a norm as it is or wider
    dtypes = dict.fromkeys((stored.dtype, getattr(torch, side.dtype), torch.float32))
    return any(digest == fingerprint(stored.to(dtype)) for dtype in dtypes)
