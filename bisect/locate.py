"""From two captures to a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Literal

import torch

from layerbisect.bisect.budget import rounding_budget
from layerbisect.bisect.carried_gap import CarriedGap, carried_gap, read_out, visible_boundaries
from layerbisect.bisect.convict import Findings, convict
from layerbisect.bisect.differences import point_differences
from layerbisect.bisect.ends import end_errors
from layerbisect.bisect.gate import (
    MIN_ROWS,
    check_model_fits,
    check_same_model,
    different_weights,
    missing_boundaries,
    model_does_not_fit,
    repeat_gap,
)
from layerbisect.bisect.join import Joined, join
from layerbisect.bisect.measure import OwnError
from layerbisect.bisect.metrics import score_gap
from layerbisect.bisect.own_error import own_errors
from layerbisect.bisect.progress import NoProgress, Progress
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.bisect.verdict import (
    Coverage,
    CoveredRows,
    Culprit,
    Gap,
    LayerEvidence,
    PointDifference,
    Points,
    Probe,
    RoundingBudget,
    RuledOut,
    Verdict,
)
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture

GAP_FACTOR = 1.5
"""A gap up to this many times what rounding predicts is explained by rounding."""
SCAN_OPERATIONS = 5e12
"""Up to so many floating-point operations every boundary is probed; beyond, they are searched."""
STANDING_OUT = 0.3
"""A layer whose share of the gap is above this, where nothing is convicted, is named for it."""

_Source = str | PathLike[str] | Capture
_Sides = tuple[Side, Side]


def bisect(
    rollout: _Source,
    trainer: _Source,
    *,
    model: str | PathLike[str],
    probe: Literal["auto", "scan", "search"] = "auto",
    progress: Progress | None = None,
) -> Verdict:
    """Compare two captures of the same tokens, and say what makes their log-probs differ.

    Args:
        rollout: a capture's directory, or a capture opened with a label or some requests only.
        trainer: the other side's.
        model: the checkpoint directory (config.json and safetensors) whose weights both ran; the
            reference is computed from it.
        probe: ``scan`` reads the carried gap out at every layer boundary, ``search`` at about log2
            of them; ``auto`` scans where that is cheap. The verdict says which was done.
        progress: takes news of what is done and what is left.

    Raises:
        LayerBisectError: what cannot be compared at all (different tokens, no rows in common,
            damaged files, another model's directory), in one sentence.
    """
    first, second = _opened(rollout), _opened(trainer)
    if first.label == second.label:
        raise LayerBisectError(
            f"both captures are labelled {first.label!r}; give them different labels"
        )
    check_same_model(first, second)
    joined = join(first, second)
    wide = "float32" in (first.info.dtype, second.info.dtype)
    reference = ReferenceModel.from_directory(
        Path(model),
        torch.float64 if wide else torch.float32,
        weight_dtype=_weight_dtype(first, second),
    )
    for capture in (first, second):
        check_model_fits(reference, model, capture)
    sides = (
        Side(first, joined.chains, joined.rollout[joined.chains.row], reference.compute_dtype),
        Side(second, joined.chains, joined.trainer[joined.chains.row], reference.compute_dtype),
    )
    case = _Case(reference, sides, joined, progress or NoProgress(), str(model))
    verdict = case.judge(probe)
    case.progress.done()
    return verdict


def _opened(source: _Source) -> Capture:
    return source if isinstance(source, Capture) else Capture.open(Path(source))


def _weight_dtype(first: Capture, second: Capture) -> torch.dtype | None:
    """Round a wider checkpoint as both engines did on loading it; not where they differ."""
    if first.info.dtype != second.info.dtype:
        return None
    dtype: torch.dtype = getattr(torch, first.info.dtype)
    return dtype


class _Case:
    """Gathers the evidence in order, and weighs it."""

    def __init__(
        self,
        model: ReferenceModel,
        sides: _Sides,
        joined: Joined,
        progress: Progress,
        directory: str,
    ) -> None:
        self.model = model
        self.sides = sides
        self.joined = joined
        self.progress = progress
        self.directory = directory
        self.layers = model.config.num_layers
        self.ruled_out: list[RuledOut] = []
        self.notes: list[str] = []

    def judge(self, probe: Literal["auto", "scan", "search"]) -> Verdict:
        differences = self._differences()
        gates = self._gates(differences)
        if gates:
            return self._verdict("inconclusive", None, differences, reasons=gates)
        carried = self._carried(probe)
        gap = self._gap(carried)
        errors = self._own_errors()
        shares = self._shares(carried, gap)
        found = convict(errors, self.sides, shares)
        judged = sum(len(e) for e in errors.values()) // 2
        misfit = model_does_not_fit(found.alike, judged)
        self.progress.start("rounding budget", 1)
        budget = rounding_budget(self.model, self.sides, self.progress.advance)
        evidence = self._layer_evidence(carried, errors)
        found = self._explain_weights(found)
        self.ruled_out += found.ruled_out
        status, reasons, culprits = self._weigh(gap, budget, found, carried, errors, misfit)
        return self._verdict(
            status,
            gap,
            differences,
            reasons=reasons,
            culprits=culprits,
            budget=budget,
            layers=evidence,
            probe=Probe(carried.mode, carried.forwards) if carried.at else None,
        )

    def _differences(self) -> tuple[PointDifference, ...]:
        return point_differences(self.sides, self.joined, self.progress)

    def _gates(self, differences: Sequence[PointDifference]) -> list[str]:
        reasons = []
        if len(self.joined) < MIN_ROWS:
            reasons.append(
                f"only {len(self.joined)} rows are in both captures, and at least {MIN_ROWS} are "
                "needed; capture more tokens"
            )
        if not self.joined.chains.lengths:
            reasons.append(
                "no sequence was captured from its first token in both captures; capture whole "
                "sequences (flush the prefix cache first)"
            )
        if not differences:
            reasons.append("the captures have no point in common; capture the same points")
        for side in self.sides:
            missing = missing_boundaries(side, self.layers)
            if missing:
                reasons.append(
                    f"{side.label} was to hold {missing[0]} and does not"
                    + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
                    + f"; see `layerbisect show {side.capture.directory}` for why"
                )
        for difference in differences:
            if difference.nonfinite:
                reasons.append(
                    f"{difference.point} holds NaN or infinity in {difference.nonfinite} of "
                    f"{difference.rows} rows{_owners(self.sides, difference.point)}; nothing after "
                    "it can be judged"
                )
                break
        return reasons

    def _carried(self, probe: Literal["auto", "scan", "search"]) -> CarriedGap:
        mode: Literal["scan", "search"]
        if probe == "auto":
            cost = 2.0 * _parameters(self.model) * len(self.joined.chains.row) * (self.layers + 1)
            mode = "scan" if cost <= SCAN_OPERATIONS else "search"
        else:
            mode = probe
        self.progress.start(f"carried gap ({mode})", 1)
        return carried_gap(self.model, self.sides, mode=mode, progress=self.progress.advance)

    def _gap(self, carried: CarriedGap) -> Gap:
        if len(self.joined.score_rollout):
            return score_gap(self.joined.score_rollout, self.joined.score_trainer)
        self.notes.append(
            "no log-prob is in both captures: the gap is read out from the last common boundary "
            "by the reference, and the head is not judged"
        )
        last = max(visible_boundaries(self.sides, self.layers), default=None)
        if last is None:
            return score_gap(self.joined.score_rollout, self.joined.score_trainer)
        ends = read_out(self.model, self.sides, last)
        return replace(score_gap(ends[0].numpy(), ends[1].numpy()), source="read-out")

    def _own_errors(self) -> dict[str, list[OwnError]]:
        self.progress.start("own error", 2 * self.layers)
        done = 0
        errors: dict[str, list[OwnError]] = {}
        for side in self.sides:
            found: list[OwnError] = []
            for layer in range(self.layers):
                found += own_errors(self.model, side, [layer])
                done += 1
                self.progress.advance(done)
            errors[side.label] = found + end_errors(self.model, side)
        return errors

    def _shares(self, carried: CarriedGap, gap: Gap) -> dict[int | None, float | None]:
        whole = gap.mae**2
        last = carried.at.get(self.layers)
        shares: dict[int | None, float | None] = {None: None}
        if not math.isfinite(whole) or whole == 0:
            return shares
        for layer in range(self.layers):
            if layer in carried.at and layer + 1 in carried.at:
                shares[layer] = (carried.at[layer + 1] ** 2 - carried.at[layer] ** 2) / whole
        if last is not None:
            shares[None] = max(1 - last**2 / whole, 0.0)
        return shares

    def _explain_weights(self, found: Findings) -> Findings:
        """Tie weights that differ from the checkpoint to the culprits that use them."""
        culprits = list(found.culprits)
        for side in self.sides:
            different, compared = different_weights(self.model, side)
            if not compared:
                self.notes.append(f"{side.label} has no weight fingerprints: weights not compared")
                continue
            if not different:
                self.ruled_out.append(
                    RuledOut(
                        f"{side.label} runs other weights",
                        f"{compared} of its tensors match the model directory in a sample each",
                    )
                )
                continue
            line = (
                f"{len(different)} of {compared} weights compared differ from the model directory: "
                + ", ".join(different[:3])
            )
            owners = [
                i
                for i, c in enumerate(culprits)
                if c.side in (side.label, "both")
                and (c.layer is None or any(f".layers.{c.layer}." in name for name in different))
            ]
            for i in owners:
                culprits[i] = replace(culprits[i], evidence=(*culprits[i].evidence, line))
            if not owners:
                self.notes.append(f"{side.label}: {line}; no operator is convicted by it")
        return replace(found, culprits=tuple(culprits))

    def _weigh(
        self,
        gap: Gap,
        budget: RoundingBudget,
        found: Findings,
        carried: CarriedGap,
        errors: Mapping[str, Sequence[OwnError]],
        misfit: str | None,
    ) -> tuple[Literal["agree", "divergent", "unstable", "inconclusive"], list[str], list[Culprit]]:
        if misfit:
            return "inconclusive", [misfit], []
        if gap.nonfinite or not gap.rows:
            return (
                "inconclusive",
                [f"{gap.nonfinite} log-probs are NaN or infinite, {gap.rows} are comparable"],
                [],
            )
        culprits = list(found.culprits)
        if culprits:
            return "divergent", [f"{len(culprits)} operators err beyond rounding"], culprits
        repeat = self._repeats()
        if repeat is not None and 0 < gap.mae <= repeat:
            return (
                "unstable",
                [
                    f"the gap of {gap.mae:.4g} nat is no larger than what one engine differs from "
                    f"itself by on the same tokens ({repeat:.4g} nat); make it repeat first "
                    "(deterministic mode, fixed batches)"
                ],
                [],
            )
        if gap.mae <= GAP_FACTOR * budget.predicted_gap:
            return (
                "agree",
                [
                    f"the gap of {gap.mae:.4g} nat is rounding: {budget.predicted_gap:.4g} nat is "
                    "predicted for this model in this dtype"
                ],
                [],
            )
        beyond = (
            f"the gap of {gap.mae:.4g} nat is beyond rounding ({budget.predicted_gap:.4g} nat "
            "predicted)"
        )
        suspect = self._standing_out(gap, budget, carried, errors)
        if suspect is None:
            return "divergent", [f"{beyond}, and no single layer makes it"], []
        return "divergent", [beyond], [suspect]

    def _standing_out(
        self,
        gap: Gap,
        budget: RoundingBudget,
        carried: CarriedGap,
        errors: Mapping[str, Sequence[OwnError]],
    ) -> Culprit | None:
        """Name the layer that makes most of a gap that no operator's own error explains."""
        shares = {
            layer: share
            for layer, share in self._shares(carried, gap).items()
            if share is not None and share > STANDING_OUT
        }
        if not shares:
            return None
        layer = max(shares, key=lambda name: shares[name])
        far = [
            label
            for label, distance in budget.distances.items()
            if distance > GAP_FACTOR * max(budget.whole, 1e-12)
        ]
        point = "logprob" if layer is None else f"layers.{layer}"
        own = [e.ratio for found in errors.values() for e in found if e.layer == layer]
        return Culprit(
            layer=layer,
            point=point,
            operator=None,
            side=far[0] if len(far) == 1 else "unknown",
            share_of_gap=shares[layer],
            own_error=max(own, default=float("nan")),
            floor=1.0,
            where="all rows",
            evidence=(
                f"{shares[layer]:.0%} of the gap is made here, and no operator in it errs beyond "
                "rounding on its own captured input",
            ),
        )

    def _repeats(self) -> float | None:
        sizes = []
        for side in self.sides:
            repeat = repeat_gap(side.capture)
            if repeat is None:
                self.notes.append(f"{side.label} computed no token twice: repeats not measured")
            elif repeat.mae == 0:
                self.ruled_out.append(
                    RuledOut(
                        f"{side.label} does not repeat itself",
                        f"{repeat.rows} repeated log-probs are equal to the bit",
                    )
                )
            else:
                sizes.append(repeat.mae)
        return max(sizes, default=None)

    def _layer_evidence(
        self, carried: CarriedGap, errors: Mapping[str, Sequence[OwnError]]
    ) -> tuple[LayerEvidence, ...]:
        evidence = []
        for layer in range(self.layers):
            worst = {
                label: max(
                    (e for e in found if e.layer == layer), key=lambda e: e.strength, default=None
                )
                for label, found in errors.items()
            }
            evidence.append(
                LayerEvidence(
                    layer=layer,
                    carried_in=carried.at.get(layer),
                    carried_out=carried.at.get(layer + 1),
                    own_error={k: e.ratio for k, e in worst.items() if e is not None},
                    worst_point={k: e.point for k, e in worst.items() if e is not None},
                )
            )
        return tuple(evidence)

    def _coverage(self, differences: Sequence[PointDifference]) -> Coverage:
        missing = []
        wanted = {p for side in self.sides for p in side.capture.info.points} - {"logprob"}
        for side in self.sides:
            missing += [f"{side.label}: {p}" for p in sorted(wanted) if not side.has(p)]
            self.notes += [f"{side.label}: {text}" for text in side.capture.problems]
            self.notes += [
                f"{side.label}: {point}: {text}"
                for point, text in side.capture.replica_findings.items()
            ]
        return Coverage(
            Points(len(differences), tuple(missing)),
            CoveredRows(len(self.joined), self.joined.left_out),
            tuple(self.notes),
        )

    def _verdict(
        self,
        status: Literal["agree", "divergent", "unstable", "inconclusive"],
        gap: Gap | None,
        differences: tuple[PointDifference, ...],
        *,
        reasons: Sequence[str],
        culprits: Sequence[Culprit] = (),
        budget: RoundingBudget | None = None,
        layers: tuple[LayerEvidence, ...] = (),
        probe: Probe | None = None,
    ) -> Verdict:
        return Verdict(
            status=status,
            gap=gap,
            culprits=tuple(culprits),
            ruled_out=tuple(self.ruled_out),
            rounding_budget=budget,
            coverage=self._coverage(differences),
            next=_next(status, culprits, self.sides, self.directory),
            reasons=tuple(reasons),
            layers=layers,
            differences=differences,
            probe=probe,
            labels=(self.sides[0].label, self.sides[1].label),
        )


def _owners(sides: _Sides, point: str) -> str:
    owners = []
    for side in sides:
        values = side.read(point)
        if values is not None and not bool(values.isfinite().all()):
            owners.append(side.label)
    return f" ({' and '.join(owners)})" if owners else ""


def _parameters(model: ReferenceModel) -> float:
    """Parameters that one token meets, the embedding aside."""
    c = model.config
    attention = c.hidden * c.head_dim * 2 * (c.heads + c.kv_heads)
    dense = 3.0 * c.hidden * c.intermediate
    sparse = 3.0 * c.hidden * c.expert_intermediate * c.top_k
    mlps = sum(sparse if c.is_sparse(layer) else dense for layer in range(c.num_layers))
    return c.num_layers * attention + mlps + c.hidden * c.vocab


def _next(status: str, culprits: Sequence[Culprit], sides: _Sides, directory: str) -> str:
    rollout, trainer = (side.capture.directory for side in sides)
    unseen = sorted({c.layer for c in culprits if c.operator is None and c.layer is not None})
    if unseen:
        points = ",".join(f"layers.{layer}" for layer in unseen)
        return (
            f"capture both sides again with points {points},logprob, then "
            f"`layerbisect bisect ROLLOUT TRAINER --model {directory}`"
        )
    if status == "agree":
        return "nothing to do; the rounding budget says which operator to raise to float32"
    if status == "divergent" and culprits:
        return f"look at {culprits[0].operator} in the code of the {culprits[0].side} side"
    if status == "divergent":
        return (
            "capture both sides again with points all, then "
            f"`layerbisect bisect ROLLOUT TRAINER --model {directory}`"
        )
    return f"`layerbisect show {rollout}` and `layerbisect show {trainer}`"
