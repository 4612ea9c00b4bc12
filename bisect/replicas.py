"""Name the first point of which ranks hold differing copies, and set apart what follows from it.

An operator is judged on one copy of its input. Where ranks that should hold the same copy do not,
those that computed from another copy would be blamed for what their input differs by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerbisect.bisect.operators import STEPS
from layerbisect.bisect.side import Side
from layerbisect.bisect.side_culprits import EMBEDDED, Shares, is_everywhere
from layerbisect.bisect.verdict import Culprit
from layerbisect.bisect.weight_evidence import WeightEvidence
from layerbisect.captures.points import all_points, boundary, parse
from layerbisect.kernels.judging.own_error import OwnError

_TOLD = 4


def read_rest(sides: tuple[Side, Side]) -> None:
    """Read, one by one, what `point_differences` does not: points that only one side shows.

    A capture compares the copies of a point when it is read.
    """
    for side, other in (sides, sides[::-1]):
        if all(len(one.ranks) == 1 for one in side.capture.passes):
            continue
        info, rows = side.capture.info, np.unique(side.index)
        for name in all_points(info.num_layers, info.moe_layers):
            if other.holds(name, other.index).any():
                continue
            held = rows[side.holds(name, rows)]
            if len(held):
                side.values(name, held)


@dataclass(frozen=True, slots=True)
class _Made:
    """The layer in which a point is made, of which captured points, and by which operators."""

    layer: int | None
    inputs: tuple[str, ...]
    operators: tuple[str, ...]


class Copies:
    """The points of one side of which ranks hold differing copies."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.findings = side.capture.replica_findings
        self.layers = side.capture.info.num_layers

    def judged_on(self, errors: Sequence[OwnError]) -> dict[str, list[OwnError]]:
        """Errors that were judged on differing copies, by the first point at which these part."""
        found: dict[str, list[OwnError]] = defaultdict(list)
        for error in errors if self.findings else ():
            root = self._root(error.point)
            if root is not None and not self.findings[root].rounding:
                found[root].append(error)
        return found

    def accuse(
        self,
        culprits: Sequence[Culprit],
        following: Mapping[str, Sequence[OwnError]],
        errors: Sequence[OwnError],
        shares: Shares,
        weights: WeightEvidence,
    ) -> list[Culprit]:
        """Add the points at which copies part first to this side's ``culprits``.

        They are told in the evidence of weights instead where those of their layer are blamed.
        """
        kept, found = list(culprits), []
        blamed = {layer for layer, _ in weights.owners(self.side.label)}
        at = next((i for i, c in enumerate(kept) if c.operator == "weights"), None)
        for points in self._grouped():
            told = [f"{p}: {self._counted(p)}" for p in points[:_TOLD]]
            after = {e.point: e for p in points for e in following.get(p, ()) if e.point != p}
            told += [
                f"{e.operator} at {e.point} is judged on one of these copies: it follows from this"
                for e in list(after.values())[:_TOLD]
            ]
            if after.keys() - list(after)[:_TOLD]:
                told.append(f"so do {len(after) - _TOLD} operators more")
            if at is not None and self._made(points[0]).layer in blamed | {kept[at].layer}:
                why = f"copies of {points[0]} differ by these weights"
                kept[at] = replace(kept[at], evidence=(*kept[at].evidence, why, *told))
            else:
                found.append(self._culprit(points, told, errors, shares))
        return [*found, *kept]

    def _counted(self, point: str) -> str:
        """Count again over all rows, for what found the copies to differ may have read a few."""
        rows = np.unique(self.side.index)
        del self.findings[point]
        self.side.capture.read(point, rows[self.side.holds(point, rows)])
        more = self.side.capture.passes[1:]
        return self.findings[point] + (", in one forward pass of several" if more else "")

    def _culprit(
        self, points: list[str], told: list[str], errors: Sequence[OwnError], shares: Shares
    ) -> Culprit:
        point, made = parse(points[0]), self._made(points[0])
        evidence = ["ranks that should hold the same copy do not", *told]
        one = len(made.operators) == 1
        if not one:
            evidence.append(
                "points between are not captured: it may be any of " + ", ".join(made.operators)
            )
        judged = next((e for e in errors if e.point == point.name), None)
        embedded = made.operators == ("embedding",)
        layers = [EMBEDDED if embedded else self._made(p).layer for p in points]
        known = [s for layer in layers if (s := shares.get(layer)) is not None]
        several = points[1:]
        return Culprit(
            # the layer to look into, where what made it is not seen
            layer=None if several else point.layer if one else made.layer,
            point=f"layers.*.{point.suffix}" if several else point.name,
            operator=made.operators[0] if one else None,
            side=self.side.label,
            share_of_gap=sum(known) if known else None,
            own_error=judged.ratio if judged else float("nan"),
            floor=judged.floor if judged else float("nan"),
            where=f"copies on some ranks, in {len(points)} of {self.layers} layers"
            if several
            else "copies on some ranks",
            evidence=tuple(evidence),
        )

    def _grouped(self) -> list[list[str]]:
        """Points at which copies part first; together where it is one operator in most layers."""
        info = self.side.capture.info
        by_suffix: dict[str, list[str]] = defaultdict(list)
        for name in all_points(info.num_layers, info.moe_layers):
            finding = self.findings.get(name)
            # what rounding parted is found, and is nobody's fault
            if finding is not None and not finding.rounding and self._root(name) == name:
                by_suffix[parse(name).suffix].append(name)
        groups: list[list[str]] = []
        for names in by_suffix.values():
            whole = is_everywhere(len(names), self.layers)
            groups += [names] if whole else [[name] for name in names]
        return groups

    def _root(self, name: str) -> str | None:
        """Go back to the first point with differing copies that a point was made of."""
        while before := [p for p in self._made(name).inputs if p in self.findings]:
            name = before[0]
        return name if name in self.findings else None

    def _made(self, name: str) -> _Made:
        point = parse(name)
        last = boundary(self.layers, self.layers)
        if name in ("embed", boundary(0, self.layers)):
            return _Made(None, (), ("embedding",))
        if point.suffix == "final_norm":
            return _Made(None, (last,), ("norm",))
        if point.layer is None:
            seen = self.side.has("final_norm")
            return _Made(None, ("final_norm" if seen else last,), ("head",))
        if point.suffix == "input":
            return self._step(point.layer - 1, "output")
        return self._step(point.layer, point.suffix)

    def _step(self, layer: int, suffix: str) -> _Made:
        inputs: list[str] = []
        sparse = layer in self.side.capture.info.moe_layers
        operators = ["linear" if suffix == "mlp.out" and not sparse else STEPS[suffix].operator]
        before = STEPS[suffix].inputs
        if suffix == "mlp.out" and sparse:
            before = ("mlp.norm", "mlp.expert_ids", "mlp.expert_weights")
            if self.side.has(f"layers.{layer}.mlp.expert_out"):
                operators, before = ["combine"], ("mlp.expert_out",)
        for one in before:
            if one == "input" or self.side.has(f"layers.{layer}.{one}"):
                inputs.append(f"layers.{layer}.{one}")
            else:
                hidden = self._step(layer, one)
                inputs += hidden.inputs
                operators += hidden.operators
        return _Made(layer, tuple(dict.fromkeys(inputs)), tuple(dict.fromkeys(operators)))
