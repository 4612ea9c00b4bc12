"""Operator bundles from a capture: what operators were given, with the model's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from layerbisect.bisect.bundle_rows import described, held, lengths_of, stored, whole_sequences
from layerbisect.bisect.gate import check_dtype, check_model_fits
from layerbisect.bisect.join import join
from layerbisect.bisect.operators import LayerPoints
from layerbisect.bisect.own_error import observations, own_errors
from layerbisect.bisect.reduction import reduction_variance
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.bisect.stretches import Stretch
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from layerbisect.kernels.judging.own_error import OwnError
from layerbisect.kernels.replay.bundle import Bundle

ROWS = 4096
"""Rows of a bundle, unless more are asked for: whole sequences where rows attend."""


def open_side(capture: Capture, model: Path) -> tuple[ReferenceModel, Side]:
    """Lay out one capture's whole sequences beside the checkpoint that its engine ran.

    Raises LayerBisectError where the two don't fit, or no row has all rows before it.
    """
    check_dtype(capture)
    reference = ReferenceModel.from_directory(
        model, torch.float64, weight_dtype=getattr(torch, capture.info.dtype)
    )
    check_model_fits(reference, model, capture)
    joined = join(capture, capture)
    if not len(joined.chains.row):
        raise LayerBisectError(
            f"{capture.directory} has no sequence from its first token on, so nothing of it can be "
            "replayed; capture whole sequences (flush the prefix cache first)"
        )
    index = joined.rollout[joined.chains.row]
    return reference, Side(capture, joined.chains, index, torch.float64)


def layer_bundles(
    model: ReferenceModel, side: Side, layer: int, *, rows: int = ROWS
) -> tuple[list[Bundle], dict[str, str]]:
    """Make a bundle of every stretch of a layer that ``side`` shows, in the order of computation.

    Each carries what bisecting said of it. At most ``rows`` rows are taken, or the first sequence.
    Returns the points that cannot be replayed, with the reason, besides.
    """
    points = LayerPoints(model, side, layer)
    judged = {error.point: error for error in own_errors(model, side, [layer])}
    made: list[Bundle] = []
    refused: dict[str, str] = {}
    for suffix in points.judged():
        error = judged[points.name(suffix)]
        # a copy has nothing to replay, and the choice goes with the weights where there are any
        both = points.captured("mlp.expert_weights") is not None
        if suffix == "mlp.expert_in" or (suffix == "mlp.expert_ids" and both):
            continue
        try:
            made.append(_layer_bundle(points, suffix, error, rows))
        except LayerBisectError as why:
            refused[error.point] = str(why)
    return made, refused


def _layer_bundle(points: LayerPoints, suffix: str, error: OwnError, most: int) -> Bundle:
    side, stretch = points.side, Stretch(points, suffix)
    observed, _ = observations(points, suffix)
    attends = any(call.operator == "attention" for call in stretch.calls)
    kept = whole_sequences(side, most) if attends else observed[:most]
    bundle = described(
        side,
        points.name(suffix),
        points.layer,
        error.operator,
        points.covers(suffix),
        kept,
        observed,
    )
    calls = tuple(stretch.calls)
    if attends:
        calls = tuple(
            replace(c, attributes={**c.attributes, "lengths": lengths_of(side, len(kept))})
            if c.operator == "attention"
            else c
            for c in calls
        )
    inputs = {s: _point(points, s)[kept] for s in stretch.inputs}
    if "inv_freq" in stretch.weights:
        inputs["position"] = bundle.position
    captured = {
        s: _point(points, s)[kept] for s in calls[-1].results if points.captured(s) is not None
    }
    variance = reduction_variance(points, suffix, kept)
    bundle = replace(
        bundle,
        calls=calls,
        inputs=inputs,
        weights={n: read() for n, read in stretch.weights.items()},
        captured=captured,
        variance=variance,
        acquitted=error.acquitted,
    )
    if any(call.operator == "experts" for call in calls):
        bundle = _with_experts(points, bundle)
    return bundle


def _with_experts(points: LayerPoints, bundle: Bundle) -> Bundle:
    """Take along the weights of the experts that some row was routed to, and renumber them."""
    ids = bundle.inputs["mlp.expert_ids"]
    used = torch.unique(ids[ids >= 0])
    pairs = [points.model.expert(points.layer, int(e)) for e in used.tolist()]
    weights = {
        "gate_up": torch.stack([held(points.side, p[0]) for p in pairs]),
        "down": torch.stack([held(points.side, p[1]) for p in pairs]),
    }
    local = torch.where(ids >= 0, torch.searchsorted(used, ids.clamp_min(0)), -1)
    return replace(
        bundle,
        inputs={**bundle.inputs, "mlp.expert_ids": local},
        weights={**bundle.weights, **weights},
        expert_numbers=tuple(used.tolist()),
    )


def _point(points: LayerPoints, suffix: str) -> torch.Tensor:
    return stored(points.side, points.get(suffix))
