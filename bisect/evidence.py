"""Gather the evidence of a case, in order: scores, carried gap, own errors, rounding budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.budget import rounding_budget
from layerbisect.bisect.carried_gap import CarriedGap, carried_gap, read_out, visible_boundaries
from layerbisect.bisect.case import Case
from layerbisect.bisect.convict import Findings, convict
from layerbisect.bisect.ends import end_errors
from layerbisect.bisect.join import repeats
from layerbisect.bisect.metrics import score_gap
from layerbisect.bisect.own_error import own_errors
from layerbisect.bisect.qkv import settled
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.routing import compare_routes
from layerbisect.bisect.routing_report import Routing
from layerbisect.bisect.routing_words import with_routes
from layerbisect.bisect.side_culprits import EMBEDDED, Shares
from layerbisect.bisect.verdict import (
    Gap,
    LayerEvidence,
    Probe,
    RoundingBudget,
    RuledOut,
    squared_above,
)
from layerbisect.bisect.weight_evidence import WeightEvidence, compare_weights
from layerbisect.kernels.judging.own_error import OwnError
from layerbisect.kernels.judging.residuals import order_freedom

SCAN_OPERATIONS = 5e12
"""Up to so many floating-point operations every boundary is probed; beyond, they are searched."""

_Scores = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True)
class Evidence:
    """All that is known of a case, before it is weighed.

    ``gap_error`` is the standard error (nat) of the gap's mean over tokens; ``repeat`` the largest
    gap (nat) of an engine against itself, None where nothing was computed twice; ``freedom`` how
    many times wider rounding may be than predicted where engines sum in the dtype of their results.
    """

    gap: Gap
    gap_error: float
    errors: Mapping[str, Sequence[OwnError]]
    carried: CarriedGap
    shares: Shares
    findings: Findings
    weights: WeightEvidence
    budget: RoundingBudget
    freedom: float
    repeat: float | None
    routing: Routing | None
    layers: tuple[LayerEvidence, ...]
    probe: Probe | None
    ruled_out: tuple[RuledOut, ...]
    notes: tuple[str, ...]


def gather(
    case: Case, probe: Literal["auto", "scan", "search"], live: CarriedGap | None = None
) -> Evidence:
    """Gather the evidence; ``probe`` says how the carried gap is located, where no ``live`` is."""
    notes: list[str] = []
    carried = live or _carried(case, probe)
    ends = _scores(case, notes)
    gap = score_gap(*ends)
    if not len(case.joined.score_rollout):
        gap = replace(gap, source="read-out")
    errors = _own_errors(case)
    weights = compare_weights(case.model, case.sides)
    case.progress.start("rounding budget", 1)
    budget = rounding_budget(case.model, case.sides, case.progress.advance)
    # where one side is narrower, its rounding is nearly all
    freedom = min(order_freedom(side.dtype) for side in case.sides)
    floor = carried.floor(budget.predicted_gap, freedom)
    if floor:
        notes.append(f"carried gaps up to {floor:.4g} nat are the tail's own rounding: no layer's")
    shares = _shares(carried, gap, case.layers, floor)
    findings = convict(errors, case.sides, shares, weights)
    routing = compare_routes(case, _convicted(errors, findings))
    told = tuple(weights.told(with_routes(culprit, routing)) for culprit in findings.culprits)
    findings = replace(findings, culprits=told)
    repeat, steady = _repeats(case, notes)
    return Evidence(
        gap=gap,
        gap_error=_standard_error(*ends),
        errors=errors,
        carried=carried,
        shares=shares,
        findings=findings,
        weights=weights,
        budget=budget,
        freedom=freedom,
        repeat=repeat,
        routing=routing,
        layers=_layers(case, carried, errors),
        probe=Probe(carried.mode, carried.forwards, carried.tail, floor) if carried.at else None,
        ruled_out=(*findings.ruled_out, *_same_weights(case, weights, notes), *steady),
        notes=tuple(notes),
    )


def _carried(case: Case, probe: Literal["auto", "scan", "search"]) -> CarriedGap:
    cost = 2.0 * _parameters(case.model) * len(case.joined.chains.row) * (case.layers + 1)
    cheap: Literal["scan", "search"] = "scan" if cost <= SCAN_OPERATIONS else "search"
    mode = cheap if probe == "auto" else probe
    case.progress.start(f"carried gap ({mode})", 1)
    return carried_gap(case.model, case.sides, mode=mode, progress=case.progress.advance)


def _scores(case: Case, notes: list[str]) -> _Scores:
    """Both sides' log-probs: those captured, or what the last common boundary is read out as."""
    joined, visible = case.joined, visible_boundaries(case.sides, case.layers)
    if len(joined.score_rollout) or not visible:
        return joined.score_rollout, joined.score_trainer
    notes.append(
        "no log-prob is in both captures: the gap is read out from the last common boundary by the "
        "reference, and the head is not judged"
    )
    first, second = read_out(case.model, case.sides, visible[-1])
    return first.numpy(), second.numpy()


def _standard_error(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    size = np.abs(first - second)
    size = size[np.isfinite(size)]
    return float(size.std() / math.sqrt(len(size))) if len(size) else 0.0


def _own_errors(case: Case) -> dict[str, list[OwnError]]:
    case.progress.start("own error", 2 * case.layers)
    done = 0
    errors: dict[str, list[OwnError]] = {}
    for side in case.sides:
        found: list[OwnError] = []
        for layer in range(case.layers):
            found += own_errors(case.model, side, [layer])
            done += 1
            case.progress.advance(done)
        errors[side.label] = settled(found) + end_errors(case.model, side)
    return errors


def _convicted(errors: Mapping[str, Sequence[OwnError]], findings: Findings) -> set[str]:
    """Points at which a side is convicted of what the other is not."""
    found = {e.point for side in errors.values() for e in side if e.convicted}
    return found - {e.point for e in findings.alike}


def _shares(
    carried: CarriedGap, gap: Gap, layers: int, floor: float
) -> dict[int | None, float | None]:
    """Shares of the squared gap; independent contributions add in squares."""
    whole = gap.mae**2
    shares: dict[int | None, float | None] = {None: None}
    if not math.isfinite(whole) or whole == 0:
        return shares
    at = {layer: squared_above(size, floor) for layer, size in carried.at.items()}
    if 0 in at:
        shares[EMBEDDED] = at[0] / whole
    for layer in range(layers):
        if layer in at and layer + 1 in at:
            shares[layer] = (at[layer + 1] - at[layer]) / whole
    last = carried.at.get(layers)
    if last is not None:
        shares[None] = max(1 - last**2 / whole, 0.0)
    return shares


def _repeats(case: Case, notes: list[str]) -> tuple[float | None, list[RuledOut]]:
    """Measure each engine against itself on tokens whose log-probs its capture holds repeatedly."""
    sizes = []
    steady = []
    for side in case.sides:
        table = side.capture.scores
        first, again = repeats(table.keys)
        if not len(first):
            notes.append(f"{side.label} computed no token twice: repeats not measured")
            continue
        repeat = score_gap(table.logprob[first], table.logprob[again])
        if repeat.mae == 0:
            steady.append(
                RuledOut(
                    f"{side.label} does not repeat itself",
                    f"{repeat.rows} repeated log-probs are equal to the bit",
                )
            )
        sizes.append(repeat.mae)
    return max(sizes, default=None), steady


def _same_weights(case: Case, weights: WeightEvidence, notes: list[str]) -> list[RuledOut]:
    """Rule other weights out where all are known, and all ranks ran one state of them."""
    found = []
    for side in case.sides:
        label, compared = side.label, weights.compared[side.label]
        if not compared:
            notes.append(f"{label} has no weight fingerprints: weights not compared")
        elif weights.different[label] or side.capture.weights_moved is not None:
            # a culprit or a note says so
            continue
        elif compared < weights.total:
            notes.append(
                f"{label}: {compared} of {weights.total} tensors compared, and they match the "
                "model directory in a sample each; no process holds the others whole and as the "
                "checkpoint does: compare them with `layerbisect weights`"
            )
        else:
            found.append(
                RuledOut(
                    f"{label} runs other weights",
                    f"all {compared} tensors match the model directory in a sample each",
                )
            )
    return found


def _layers(
    case: Case, carried: CarriedGap, errors: Mapping[str, Sequence[OwnError]]
) -> tuple[LayerEvidence, ...]:
    evidence = []
    for layer in range(case.layers):
        worst = {
            label: max((e for e in found if e.layer == layer), key=lambda e: e.strength)
            for label, found in errors.items()
            if any(e.layer == layer for e in found)
        }
        evidence.append(
            LayerEvidence(
                layer=layer,
                carried_in=carried.at.get(layer),
                carried_out=carried.at.get(layer + 1),
                own_error={label: e.ratio for label, e in worst.items()},
                worst_point={label: e.point for label, e in worst.items()},
            )
        )
    return tuple(evidence)


def _parameters(model: ReferenceModel) -> float:
    """Parameters that one token meets, the embedding aside."""
    c = model.config
    attention = c.hidden * c.head_dim * 2 * (c.heads + c.kv_heads)
    dense = 3.0 * c.hidden * c.intermediate
    sparse = 3.0 * c.hidden * c.expert_intermediate * c.top_k
    mlps = sum(sparse if c.is_sparse(layer) else dense for layer in range(c.num_layers))
    return c.num_layers * attention + mlps + c.hidden * c.vocab
