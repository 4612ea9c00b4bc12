"""What a comparison of weights found, what it covered, and the verdict that follows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from layerbisect.bisect.verdict import (
    EXIT_CODES,
    Coverage,
    CoveredRows,
    Culprit,
    Points,
    RuledOut,
    Status,
    Verdict,
)

Kind = Literal[
    "not loaded",
    "missing",
    "stale",
    "swapped",
    "permuted",
    "transposed",
    "scaled",
    "offset",
    "one shard",
    "rows",
    "few values",
    "low rank",
    "block scales",
    "tied head",
    "adapter",
    "replicas",
    "shape",
    "drift",
    "different",
]
KINDS: Mapping[Kind, str] = {
    "not loaded": "never loaded: zeros, a constant, NaN, or values of another origin",
    "missing": "on the other side alone, and should be on both",
    "stale": "equal to the previous weights on one side alone",
    "swapped": "another tensor of the other side",
    "permuted": "the same rows or columns in another order",
    "transposed": "transposed",
    "scaled": "a multiple of the other side's",
    "offset": "the other side's plus a constant",
    "one shard": "different in one tensor-parallel slice alone",
    "rows": "different in some rows alone",
    "few values": "different in a few values alone",
    "low rank": "different by a matrix of low rank, as an adapter makes",
    "block scales": "scales of quantised blocks that do not belong to them",
    "tied head": "a head of its own where the other side ties it to the embedding",
    "adapter": "an adapter that one side alone holds",
    "replicas": "copies within one side that differ",
    "shape": "of another shape",
    "drift": "a little different, as after an update",
    "different": "different, in no way that is known",
}
"""Every way in which a tensor can differ, and what it means."""

_LAYER = re.compile(r"(.*layers\.)(\d+)(\..*)")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


@dataclass(frozen=True, slots=True)
class Finding:
    """One tensor that differs.

    ``difference`` is the norm of the difference over the larger norm, in float32; ``unit`` what
    rounding to the narrower dtype makes of that. ``side`` is the label of the side that is off, or
    ``unknown``. ``how`` is the same for all tensors of one fault.
    """

    name: str
    kind: Kind
    side: str
    how: str
    difference: float
    unit: float
    where: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """The tensors that differ in one way on one side; ``what`` names them in short."""

    kind: Kind
    side: str
    how: str
    what: str
    names: tuple[str, ...]
    difference: float
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightCoverage:
    """What the check covered.

    ``tensors`` and ``bytes`` (of the first side) were compared by value or digest, ``shards``
    counts the parts that they were stored in, and ``sampled`` those tensors of which one side
    holds digests alone. Of those compared ``cast`` are equal but for the dtype, and ``quantised``
    but for the rounding of quantisation. ``not_compared`` says why.
    """

    tensors: int
    bytes: int
    shards: int
    same: int
    cast: int
    quantised: int
    sampled: int
    only: Mapping[str, tuple[str, ...]]
    not_compared: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightReport:
    """The whole answer; ``bool(report)`` is True when the sides agree."""

    status: Status
    labels: tuple[str, str]
    versions: Mapping[str, str | None]
    findings: tuple[Finding, ...]
    coverage: WeightCoverage
    ruled_out: tuple[RuledOut, ...]
    reasons: tuple[str, ...]
    next: str = ""

    def __bool__(self) -> bool:
        return self.status == "agree"

    @property
    def exit_code(self) -> int:
        """0 agree, 1 divergent, 2 could not judge."""
        return EXIT_CODES[self.status]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The findings by kind, side and fault; those of most tensors first."""
        gathered: dict[tuple[Kind, str, str], list[Finding]] = {}
        for one in self.findings:
            gathered.setdefault((one.kind, one.side, one.how), []).append(one)
        made = [_group(*key, found) for key, found in gathered.items()]
        return tuple(sorted(made, key=lambda g: (list(KINDS).index(g.kind), -len(g.names))))

    @property
    def verdict(self) -> Verdict:
        """The same as a verdict of the whole tool, one culprit a group."""
        return Verdict(
            status=self.status,
            gap=None,
            culprits=tuple(_culprit(group, self.findings) for group in self.groups),
            ruled_out=self.ruled_out,
            rounding_budget=None,
            coverage=Coverage(
                Points(
                    self.coverage.tensors,
                    tuple(sorted({n for names in self.coverage.only.values() for n in names}))
                    + tuple(sorted(self.coverage.not_compared)),
                ),
                CoveredRows(0, 0),
                self.coverage.notes,
            ),
            next=self.next,
            reasons=self.reasons,
            labels=self.labels,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data, and under ``weights`` what it rests on."""
        plain = self.verdict.to_json()
        return {
            **plain,
            "weights": {
                "versions": dict(self.versions),
                "groups": [_finite(dataclasses.asdict(group)) for group in self.groups],
                "tensors": [_finite(dataclasses.asdict(one)) for one in self.findings],
                "coverage": dataclasses.asdict(self.coverage),
            },
        }


def described(names: Sequence[str]) -> str:
    """Name tensors in short: ``layers 0-15 mlp.experts.0-7.*``, and those of no layer."""
    by_layer: dict[int, dict[str, set[int]]] = {}
    others: set[str] = set()
    for name in names:
        found = _LAYER.fullmatch(name)
        if found is None:
            others.add(name.removesuffix(".weight"))
            continue
        part = found[3].strip(".").removesuffix(".weight")
        expert = _EXPERT.fullmatch(part)
        parts = by_layer.setdefault(int(found[2]), {})
        experts = parts.setdefault(_EXPERT.sub(r"\1*\3", part), set())
        if expert is not None:
            experts.add(int(expert[2]))
    layers: dict[tuple[str, ...], list[int]] = {}
    for layer, parts in sorted(by_layer.items()):
        layers.setdefault(_short(parts), []).append(layer)
    said = [
        f"layer{'s' if len(held) > 1 else ''} {ranges(held)} {', '.join(parts)}"
        for parts, held in layers.items()
    ]
    return "; ".join([*_few(said, 4), *_few(sorted(others), 4)])


def tensors(number: int) -> str:
    """Write how many tensors."""
    return f"{number:,} tensor{'' if number == 1 else 's'}"


def ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as ranges: ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(_few([f"{a}-{b}" if b > a else f"{a}" for a, b in runs], 6))


def _few(said: list[str], limit: int) -> list[str]:
    rest = len(said) - limit
    return said if rest <= 0 else [*said[:limit], f"{rest} more"]


def _short(parts: Mapping[str, set[int]]) -> tuple[str, ...]:
    """Write all matrices of the experts, of attention or of an MLP as one."""
    kept = {
        name.replace(".*.", f".{ranges(sorted(experts)).replace(' ', '')}.") if experts else name
        for name, experts in parts.items()
    }
    for stem in sorted({name.rpartition(".")[0] for name in kept}):
        members = _ATTENTION if stem.endswith("self_attn") else _MLP
        whole = {f"{stem}.{member}" for member in members}
        if whole <= kept:
            kept = kept - whole | {f"{stem}.*" if ".experts." in stem else f"{stem}.*_proj"}
    return tuple(_few(sorted(kept), 4))


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to."""
    found = _LAYER.fullmatch(name)
    return None if found is None else int(found[2])


def _group(kind: Kind, side: str, how: str, found: Sequence[Finding]) -> Group:
    names = tuple(one.name for one in found)
    worst = max(found, key=lambda one: (one.difference == one.difference, one.difference))
    evidence = tuple(dict.fromkeys(line for one in found for line in one.evidence))
    return Group(kind, side, how, described(names), names, worst.difference, evidence[:8])


def _culprit(group: Group, findings: Sequence[Finding]) -> Culprit:
    own = [f for f in findings if (f.kind, f.side, f.how) == (group.kind, group.side, group.how)]
    layers = {layer_of(name) for name in group.names}
    places = sorted({f.where for f in own if f.where})
    return Culprit(
        layer=layers.pop() if len(layers) == 1 else None,
        point=group.names[0] if len(group.names) == 1 else group.what,
        operator="weights",
        side=group.side,
        share_of_gap=None,
        own_error=max(f.difference / f.unit for f in own),
        floor=1.0,
        where="; ".join(_few(places, 4)),
        evidence=(f"{group.what}: {KINDS[group.kind]}: {group.how}", *group.evidence),
    )


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not (value - value == 0):
        return None
    return value
