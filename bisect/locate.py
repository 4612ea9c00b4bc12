"""From two captures to a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Literal

import torch

from layerbisect.bisect.case import Case
from layerbisect.bisect.config_differences import with_settings
from layerbisect.bisect.differences import Comparison, point_differences
from layerbisect.bisect.evidence import Evidence, gather
from layerbisect.bisect.gate import (
    check_dtype,
    check_model_fits,
    check_same_model,
    missing_boundaries,
    too_little,
)
from layerbisect.bisect.join import join
from layerbisect.bisect.live_gap import read_live
from layerbisect.bisect.next_step import next_step
from layerbisect.bisect.nonfinite import first_nonfinite
from layerbisect.bisect.progress import NoProgress, Progress
from layerbisect.bisect.recorded import open_record, with_record
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.routing_report import GapSplit, Routing
from layerbisect.bisect.routing_split import split_gap
from layerbisect.bisect.sensitivity import smallest_faults
from layerbisect.bisect.shown import environment, operator_errors
from layerbisect.bisect.side import Side
from layerbisect.bisect.token_evidence import token_report
from layerbisect.bisect.verdict import (
    Coverage,
    CoveredRows,
    PointDifference,
    Points,
    Verdict,
)
from layerbisect.bisect.weigh import Judgement, weigh
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.store import Capture


def bisect(
    rollout: str | PathLike[str] | Capture,
    trainer: str | PathLike[str] | Capture,
    *,
    model: str | PathLike[str],
    forced: Sequence[str | PathLike[str] | Capture] = (),
    probe: Literal["auto", "scan", "search"] = "auto",
    carried: str | PathLike[str] | None = None,
    record: ScoreRecord | str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Compare two captures of the same tokens, and say what makes their log-probs differ.

    Args:
        rollout: a capture's directory, or a capture opened with a label or some requests only.
        trainer: the other side's.
        model: the checkpoint directory (config.json and safetensors) whose weights both ran; the
            reference is computed from it.
        forced: further captures of the trainer on these tokens, with the rollout's routes forced on
            it, with and without their weights; they say how much of the gap routing makes.
        probe: ``scan`` reads the carried gap out at every layer boundary, ``search`` at about log2
            of them; ``auto`` scans where that is cheap. The verdict says which was done.
        carried: the file that a live trainer wrote of these captures, with its own layers as the
            tail; it stands in for the reference's, and no boundary is probed.
        record: the record of A, B and C of the same responses, or its file: it shows what was done
            to scores after an engine had computed them, which no capture does.
        progress: takes news of what is done and what is left.

    Raises:
        LayerBisectError: what cannot be compared at all (different tokens, no rows in common,
            damaged files, another model's directory, a forced capture or a carried gap of something
            else), in one sentence.
    """
    case = _open(rollout, trainer, model, progress or NoProgress())
    captures = [side.capture for side in case.sides]
    kept = None if record is None else open_record(record, captures)
    live = None if carried is None else read_live(carried, case)
    split = None
    if forced:
        others = [one if isinstance(one, Capture) else Capture.open(one) for one in forced]
        first, second = (side.capture for side in case.sides)
        split = split_gap(first, second, others)
    compared = point_differences(case.sides, case.joined, case.model.config.experts, case.progress)
    evidence = None
    judgement = _gates(case, compared.points)
    if judgement is None:
        evidence = gather(case, probe, live.carried if live else None)
        if live is not None:
            live.check(evidence.budget.predicted_gap, evidence.freedom)
        judgement = weigh(evidence)
    case.progress.done()
    verdict = _verdict(case, compared, evidence, judgement, split)
    if kept is not None:
        verdict = with_record(verdict, *kept, captures)
    ours, theirs = case.sides
    return with_settings(verdict, (ours.capture, theirs.capture), model)


def _open(
    rollout: str | PathLike[str] | Capture,
    trainer: str | PathLike[str] | Capture,
    model: str | PathLike[str],
    progress: Progress,
) -> Case:
    captures = tuple(
        source if isinstance(source, Capture) else Capture.open(source)
        for source in (rollout, trainer)
    )
    first, second = captures
    if first.label == second.label:
        raise LayerBisectError(
            f"both captures are labelled {first.label!r}; give them different labels"
        )
    for capture in captures:
        if capture.label in ("both", "unknown"):
            raise LayerBisectError(
                f"{capture.label!r} is what a verdict calls more than one side, or none; give "
                f"{capture.directory} another label"
            )
        check_dtype(capture)
    check_same_model(first, second)
    joined = join(first, second)
    dtypes = {capture.info.dtype for capture in captures}
    reference = ReferenceModel.from_directory(
        Path(model),
        torch.float64 if "float32" in dtypes else torch.float32,
        # a wider checkpoint is rounded as both engines did on loading it; not where they differ
        weight_dtype=getattr(torch, dtypes.pop()) if len(dtypes) == 1 else None,
    )
    for capture in captures:
        check_model_fits(reference, model, capture)
    row = joined.chains.row
    sides = (
        Side(first, joined.chains, joined.rollout[row], reference.compute_dtype),
        Side(second, joined.chains, joined.trainer[row], reference.compute_dtype),
    )
    return Case(reference, sides, joined, progress, str(model))


def _gates(case: Case, differences: Sequence[PointDifference]) -> Judgement | None:
    """Say why the evidence cannot be gathered, None where it can."""
    usable = int(case.joined.chains.fresh.sum())
    reasons = too_little(len(case.joined), usable, len(differences))
    reasons += [m for side in case.sides if (m := missing_boundaries(side, case.layers))]
    found = first_nonfinite(case.sides, differences)
    if found is None:
        return Judgement("inconclusive", tuple(reasons)) if reasons else None
    culprit = None if reasons else found.culprit(case.model)
    if culprit is None:
        return Judgement("inconclusive", (*reasons, found.sentence))
    return Judgement("divergent", (found.sentence,), (culprit,))


def _verdict(
    case: Case,
    compared: Comparison,
    evidence: Evidence | None,
    judgement: Judgement,
    split: GapSplit | None,
) -> Verdict:
    notes = case.notes() + (list(evidence.notes) if evidence else [])
    return Verdict(
        status=judgement.status,
        gap=evidence.gap if evidence else None,
        culprits=judgement.culprits,
        ruled_out=evidence.ruled_out if evidence else (),
        rounding_budget=evidence.budget if evidence else None,
        coverage=Coverage(
            Points(len(compared.points), case.missing()),
            CoveredRows(len(case.joined), case.joined.left_out),
            tuple(notes),
        ),
        next=next_step(
            case,
            judgement,
            evidence.weights if evidence else None,
            evidence.errors if evidence else {},
        ),
        reasons=judgement.reasons,
        layers=evidence.layers if evidence else (),
        differences=compared.points,
        probe=evidence.probe if evidence else None,
        labels=(case.sides[0].label, case.sides[1].label),
        routing=_routing(evidence, split),
        sensitivity=smallest_faults(evidence.errors) if evidence else (),
        own_errors=operator_errors(evidence.errors) if evidence else (),
        tokens=token_report(case, compared.streams, evidence.carried if evidence else None),
        environments={side.label: environment(side.capture) for side in case.sides},
    )


def _routing(evidence: Evidence | None, split: GapSplit | None) -> Routing | None:
    found = evidence.routing if evidence else None
    return found if split is None else replace(found or Routing((), {}), split=split)
