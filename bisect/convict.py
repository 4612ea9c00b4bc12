"""From own errors to culprits: one culprit a fault, with its side and where it sits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from layerbisect.bisect.measure import OwnError
from layerbisect.bisect.side import Side
from layerbisect.bisect.verdict import Culprit, RuledOut
from layerbisect.bisect.where import describe

ALIKE = 0.5
"""Two sides err alike when their errors differ by less than this share of their size."""
EVERYWHERE = 0.5
"""A fault in more than this share of the layers is one fault of the whole side."""
EVERYWHERE_LAYERS = 3


@dataclass(frozen=True, slots=True)
class Findings:
    """Culprits on either side, and what both sides do alike, which makes no gap between them."""

    culprits: tuple[Culprit, ...]
    alike: tuple[OwnError, ...]
    ruled_out: tuple[RuledOut, ...]


def convict(
    errors: Mapping[str, Sequence[OwnError]],
    sides: tuple[Side, Side],
    shares: Mapping[int | None, float | None],
) -> Findings:
    """Name the culprits among both sides' own errors.

    ``shares`` maps a layer, or None for the head and what else belongs to no layer, to its share of
    the gap. An operator that errs alike on both sides is set apart.
    """
    by_label = {side.label: side for side in sides}
    convicted = {label: [e for e in found if e.convicted] for label, found in errors.items()}
    first, second = (convicted[side.label] for side in sides)
    alike = [e for e in first if any(_alike(e, other) for other in second)]
    alike_points = {e.point for e in alike}
    culprits: list[Culprit] = []
    for label, found in convicted.items():
        own = [e for e in found if e.point not in alike_points]
        total_layers = len({e.layer for e in errors[label]} - {None})
        culprits += _culprits(own, by_label[label], shares, total_layers)
    culprits = _both_sides(culprits)
    culprits.sort(key=lambda c: (-(c.share_of_gap or 0.0), -c.own_error))
    ruled_out = [
        RuledOut(
            f"{e.operator} at {e.point}",
            f"both sides compute it alike, {e.ratio:.1f}x rounding from the model directory's "
            "reference, so it makes no gap between them",
        )
        for e in alike[:5]
    ]
    return Findings(tuple(culprits), tuple(alike), tuple(ruled_out))


def _alike(a: OwnError, b: OwnError) -> bool:
    if a.point != b.point or a.error is None or b.error is None:
        return False
    common, at_a, at_b = _intersect(a.flat_rows, b.flat_rows)
    if not common or a.error.shape[1] != b.error.shape[1]:
        return False
    ours, theirs = a.error[at_a], b.error[at_b]
    size = torch.maximum(ours.square().mean(), theirs.square().mean()).sqrt()
    return bool((ours - theirs).square().mean().sqrt() < ALIKE * size)


def _intersect(a: torch.Tensor, b: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    place = {int(row): i for i, row in enumerate(b.tolist())}
    pairs = [(i, place[row]) for i, row in enumerate(a.tolist()) if row in place]
    if not pairs:
        return 0, torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
    at_a, at_b = zip(*pairs, strict=True)
    return len(pairs), torch.tensor(at_a), torch.tensor(at_b)


def _culprits(
    found: Iterable[OwnError],
    side: Side,
    shares: Mapping[int | None, float | None],
    total_layers: int,
) -> list[Culprit]:
    merged: dict[tuple[int | None, str | None], list[OwnError]] = defaultdict(list)
    for error in found:
        operator = error.operator if len(error.covers) == 1 or error.parted else None
        merged[error.layer, operator].append(error)
    culprits = [
        _culprit(layer, operator, group, side, shares)
        for (layer, operator), group in merged.items()
    ]
    return _collapse(culprits, total_layers)


def _culprit(
    layer: int | None,
    operator: str | None,
    group: Sequence[OwnError],
    side: Side,
    shares: Mapping[int | None, float | None],
) -> Culprit:
    worst = max(group, key=lambda e: e.strength)
    evidence = [sentence for error in group for sentence in _evidence(error)]
    if operator is None:
        evidence.append(
            "points between are not captured: it may be any of " + ", ".join(worst.covers)
        )
    return Culprit(
        layer=layer,
        point=group[0].point,
        operator=operator,
        side=side.label,
        share_of_gap=shares.get(layer),
        own_error=worst.ratio,
        floor=worst.floor,
        where=describe(worst, side),
        evidence=tuple(evidence),
    )


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
    for f in error.fits[:3]:
        lines.append(
            f"{error.point}: systematic, {f.name} {f.coefficient:+.4g} "
            f"({abs(f.z):.0f} standard errors from none)"
        )
    lines += [f"{error.point}: {error.parted}"] if error.parted else []
    if error.set_aside:
        lines.append(f"{error.point}: {error.set_aside} rows with a near tie in routing set aside")
    return lines


def _collapse(culprits: list[Culprit], total_layers: int) -> list[Culprit]:
    """Make one culprit of what errs in most layers: a wrong setting, or stale weights."""
    layered = [c for c in culprits if c.layer is not None]
    kept = [c for c in culprits if c.layer is None]
    weighted = {c.layer for c in layered if c.operator in ("linear", "experts", "router", None)}
    if _is_everywhere(len(weighted), total_layers) and len({c.operator for c in layered}) > 1:
        worst = max(layered, key=lambda c: c.own_error)
        return [
            replace(
                worst,
                layer=None,
                point="layers.*",
                operator="weights",
                share_of_gap=_sum_shares(layered),
                where=f"{len(weighted)} of {total_layers} layers",
                evidence=(
                    f"operators that hold weights err in {len(weighted)} of {total_layers} layers: "
                    "this side does not run the weights of the model directory (stale, or loaded "
                    "wrongly)",
                    *worst.evidence,
                ),
            )
        ]
    by_operator: dict[str | None, list[Culprit]] = defaultdict(list)
    for culprit in layered:
        by_operator[culprit.operator].append(culprit)
    for operator, group in by_operator.items():
        if not _is_everywhere(len(group), total_layers):
            kept += group
            continue
        worst = max(group, key=lambda c: c.own_error)
        layers = sorted(c.layer for c in group if c.layer is not None)
        kept.append(
            replace(
                worst,
                layer=None,
                point=worst.point.replace(f"layers.{worst.layer}.", "layers.*."),
                operator=operator,
                share_of_gap=_sum_shares(group),
                where=f"{len(layers)} of {total_layers} layers, {layers[0]} the first",
            )
        )
    return kept


def _is_everywhere(count: int, total: int) -> bool:
    return count >= EVERYWHERE_LAYERS and count > EVERYWHERE * total


def _sum_shares(group: Sequence[Culprit]) -> float | None:
    by_layer = {c.layer: c.share_of_gap for c in group if c.share_of_gap is not None}
    return sum(by_layer.values()) if by_layer else None


def _both_sides(culprits: Sequence[Culprit]) -> list[Culprit]:
    """Two sides that err at one operator, each in its own way, are one culprit of both."""
    merged: dict[tuple[int | None, str | None, str], Culprit] = {}
    for culprit in culprits:
        key = (culprit.layer, culprit.operator, culprit.point)
        other = merged.get(key)
        if other is None:
            merged[key] = culprit
        else:
            evidence = tuple(f"{c.side}: {line}" for c in (other, culprit) for line in c.evidence)
            worst = max(other, culprit, key=lambda c: c.own_error)
            merged[key] = replace(worst, side="both", evidence=evidence)
    return list(merged.values())
