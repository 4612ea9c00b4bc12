"""One side's errors made into culprits: one a fault, however many operators it makes err."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from layerbisect.bisect.side import Side
from layerbisect.bisect.verdict import Culprit
from layerbisect.bisect.weight_evidence import WEIGHTED, Owner, WeightEvidence, owner
from layerbisect.bisect.where import describe
from layerbisect.kernels.judging.own_error import EXTREME_RATIO, OwnError

EVERYWHERE = 0.5
"""A fault in more than this share of the layers is one fault of the whole side."""
EVERYWHERE_LAYERS = 3
WEIGHTED_POINTS = 3
"""So many points of a layer that follow from weights, wrong in several: the weights are wrong."""
FEW_WEIGHTS = 3
"""Up to so many operators with wrong weights are blamed one by one."""

Shares = Mapping[int | None, float | None]
"""Shares of the squared gap by layer; None stands for what follows the last layer."""
EMBEDDED = -1
"""Stands for what comes before the first layer, in `Shares`."""


def is_everywhere(count: int, total: int) -> bool:
    """Whether so many of the layers are most of them."""
    return count >= EVERYWHERE_LAYERS and count > EVERYWHERE * total


class SideCulprits:
    """Makes culprits of one side's errors."""

    def __init__(
        self, judged: Sequence[OwnError], side: Side, shares: Shares, weights: WeightEvidence
    ) -> None:
        self.side = side
        self.shares = shares
        self.weights = weights
        self.layers = len({e.layer for e in judged} - {None})

    def name(self, found: Sequence[OwnError]) -> list[Culprit]:
        """Group errors into one culprit a fault."""
        by_weights = self._by_weights(found)
        rest = [e for e in found if e not in by_weights]
        culprits = [self._culprit(group) for group in self._grouped(rest)]
        if by_weights or self._stale(found):
            culprits.append(self._weights_culprit(by_weights))
        return culprits

    def _stale(self, found: Iterable[OwnError]) -> set[Owner]:
        """Whose weights are wrong as such, by fingerprints, and not just as one operator's fault.

        A few wrong tensors that are seen to make their operators err are these operators' faults,
        unless the side's own ranks hold them in several states.
        """
        owners = self.weights.owners(self.side.label)
        # where weights are wrong, others that err too and of which no process held all are as well
        layers = {layer for layer, _ in owners} - {None}
        compared = {owner(name) for name in self.side.capture.info.fingerprints}
        owners |= {
            place
            for e in found
            if e.layer in layers
            and (operator := _operator(e)) in WEIGHTED
            and (place := (e.layer, operator)) not in compared
        }
        if self.weights.tied and (None, "embedding") in owners:
            # the head reads the same table
            owners |= {(None, "head") for e in found if e.operator == "head"}
        explained = {(e.layer, e.operator) for e in found}
        # a stretch of several operators holds all weights of its layer
        whole = {e.layer for e in found if _operator(e) is None}
        unexplained = {o for o in owners if o not in explained and o[0] not in whole}
        torn = self.weights.torn[self.side.label]
        return owners if unexplained or torn or len(owners) > FEW_WEIGHTS else set()

    def _by_weights(self, found: Sequence[OwnError]) -> list[OwnError]:
        """Errors that other weights explain: of those fingerprinted, or because they are many.

        Without fingerprints one wrong setting has to be told from wrong weights: it shows at one or
        two points of a layer, and weights at all that follow from them.
        """
        stale = self._stale(found)
        if stale:
            layers = {layer for layer, _ in stale}
            return [
                e
                for e in found
                if (e.layer, _operator(e)) in stale
                # queries and keys that weights scale look as if turned otherwise
                or ((_operator(e) is None or e.parted) and e.layer in layers)
            ]
        holding = [e for e in found if _operator(e) in WEIGHTED]
        wrong: dict[int, set[str]] = defaultdict(set)
        for e in holding:
            # a wrong setting may touch every norm of a layer
            if e.layer is not None and _operator(e) != "norm":
                wrong[e.layer].add(e.point)
        many = {layer for layer, points in wrong.items() if len(points) >= WEIGHTED_POINTS}
        if len(many) < EVERYWHERE_LAYERS:
            return []
        ends = {None} if is_everywhere(len(many), self.layers) else set()
        turned = [e for e in found if e.parted and e.layer in many and e not in holding]
        return [e for e in holding if e.layer in many | ends] + turned

    def _grouped(self, found: Sequence[OwnError]) -> list[list[OwnError]]:
        """One group an operator that errs in most layers, and else one a place in a layer."""
        by_operator: dict[str | None, list[OwnError]] = defaultdict(list)
        for error in found:
            by_operator[_operator(error)].append(error)
        groups: list[list[OwnError]] = []
        for errors in by_operator.values():
            if is_everywhere(len({e.layer for e in errors} - {None}), self.layers):
                groups.append(errors)
                continue
            by_place: dict[tuple[int | None, str], list[OwnError]] = defaultdict(list)
            for error in errors:
                by_place[error.layer, self._place(error)].append(error)
            groups += by_place.values()
        return groups

    def _place(self, error: OwnError) -> str:
        """Where in a layer an error is; what stretches over the MLP's norm is at one place."""
        suffix = error.point.split(".", 2)[-1]
        hidden = not self.side.has(f"layers.{error.layer}.mlp.norm")
        if error.layer is None or suffix.startswith("attn.") or suffix == "mid" or not hidden:
            return _place(error.point)
        # each of them is recomputed through the same points, so one fault there makes all err
        return "mlp" if _operator(error) is None else _place(error.point)

    def _culprit(self, group: Sequence[OwnError]) -> Culprit:
        worst = max(group, key=lambda e: e.strength)
        layers = sorted({e.layer for e in group if e.layer is not None})
        one = len(layers) <= 1
        if not one:
            worst = max((e for e in group if e.layer is not None), key=lambda e: e.strength)
        operator = _operator(worst)
        shown = group if one else [worst]
        evidence = [sentence for error in shown for sentence in _evidence(error)]
        if operator is None:
            evidence.append(
                "points between are not captured: it may be any of " + ", ".join(_common(shown))
            )
        return Culprit(
            layer=worst.layer if one else None,
            point=group[0].point if one else _every_layer(worst.point),
            operator=operator,
            side=self.side.label,
            share_of_gap=self._share(layers or [EMBEDDED if operator == "embedding" else None]),
            own_error=worst.ratio,
            floor=worst.floor,
            where=describe(worst, self.side) if one else self._where(layers),
            evidence=tuple(evidence),
        )

    def _weights_culprit(self, group: Sequence[OwnError]) -> Culprit:
        label = self.side.label
        names = self.weights.off(label)
        layers = {layer for layer, _ in self.weights.owners(label)} | {e.layer for e in group}
        evidence = list(self.weights.ranks[label])
        if names:
            evidence.append(
                f"{len(names)} of {self.weights.compared[label]} tensors compared differ from the "
                f"model directory, such as {names[0]}: stale, or loaded wrongly"
            )
        elif not evidence:
            evidence.append(
                f"operators that hold weights err in {len(layers - {None})} of {self.layers} "
                "layers, several in each: this side does not run the weights of the model "
                "directory (stale, loaded wrongly, or quantized)"
            )
        worst = max(group, key=lambda e: e.strength, default=None)
        if worst is None:
            evidence.append("no operator errs beyond rounding by it")
        else:
            evidence += _evidence(worst)
        layer = next(iter(layers)) if len(layers) == 1 else None
        return Culprit(
            layer=layer,
            point="layers.*" if layer is None else f"layers.{layer}",
            operator="weights",
            side=label,
            share_of_gap=self._share(sorted(layers, key=lambda n: -1 if n is None else n)),
            own_error=worst.ratio if worst else float("nan"),
            floor=worst.floor if worst else float("nan"),
            where=self._where(layers),
            evidence=tuple(evidence),
        )

    def _where(self, layers: Iterable[int | None]) -> str:
        inside = [layer for layer in layers if layer is not None]
        if not inside:
            return "all rows"
        return f"{len(inside)} of {self.layers} layers, {min(inside)} the first"

    def _share(self, layers: Sequence[int | None]) -> float | None:
        known = [s for layer in layers if (s := self.shares.get(layer)) is not None]
        return sum(known) if known else None


def _operator(error: OwnError) -> str | None:
    return error.operator if len(error.covers) == 1 or error.parted else None


def _place(point: str) -> str:
    """Where in a layer a point is; queries, keys and values are made in one place."""
    suffix = point.split(".", 2)[-1]
    return "attn.qkv" if suffix in ("attn.q", "attn.k", "attn.v") else suffix


def _common(group: Sequence[OwnError]) -> list[str]:
    """Operators that all of a group's stretches have, in the order of computation."""
    return [name for name in group[0].covers if all(name in e.covers for e in group)]


def _every_layer(point: str) -> str:
    return "layers.*." + point.split(".", 2)[2]


def _evidence(error: OwnError) -> list[str]:
    lines = []
    if error.nonfinite:
        lines.append(f"{error.point}: {error.nonfinite} rows hold NaN or infinity")
    if error.beyond_rounding:
        lines.append(
            f"{error.point}: on its own captured input, error {error.ratio:.1f}x rounding at the "
            f"95th percentile of {error.rows} rows ({error.floor:.1f}x for the low-precision "
            f"reference); {error.excess:.1%} of rows in excess"
        )
    elif error.extreme:
        lines.append(
            f"{error.point}: {error.extreme} of {error.rows} rows err more than "
            f"{EXTREME_RATIO:.0f}x rounding, {float(error.row_ratio.max()):.0f}x the worst"
        )
    for f in error.fits[:3]:
        lines.append(
            f"{error.point}: systematic, {f.name} {f.coefficient:+.4g} "
            f"({abs(f.z):.0f} standard errors from none)"
        )
    lines += [f"{error.point}: {error.parted}"] if error.parted else []
    if error.set_aside:
        lines.append(
            f"{error.point}: {error.set_aside} rows set aside (a near tie in routing, or an input "
            "that is not finite)"
        )
    return lines
