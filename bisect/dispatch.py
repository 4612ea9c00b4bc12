"""Whether each expert was given the rows that were sent to it: copies, which nothing rounds."""

from __future__ import annotations

from dataclasses import replace

import torch

from layerbisect.bisect.exact_choice import error_of_rows
from layerbisect.bisect.operators import LayerPoints
from layerbisect.kernels.judging.own_error import OwnError, Sample
from layerbisect.kernels.judging.residuals import unit_roundoff

_WRONG = 1e6
"""Ratio of a copy that differs at all to a rounding that cannot be there."""


def judge_dispatch(points: LayerPoints) -> OwnError:
    """Compare each slot's input, bit by bit, with what the side's own row was before dispatch.

    Rows whose norm is not finite are set aside, and those with a slot that is no expert's.
    """
    captured, ids = points.captured("mlp.expert_in"), points.captured("mlp.expert_ids")
    assert captured is not None and ids is not None
    normed = points.get("mlp.norm")
    rows = points.side.fresh
    known = normed[rows].isfinite().all(1)
    set_aside = int((~known).sum())
    rows = rows[known & points.routed(ids[rows])]
    given, sent = captured[rows], normed[rows][:, None]
    wrong = (given != sent).any(2)
    ratio = torch.where(wrong.any(1), _WRONG, 0.0)
    judged = error_of_rows(
        points,
        "mlp.expert_in",
        rows,
        ratio,
        nonfinite=int((~given.isfinite().all(2)).any(1).sum()),
        set_aside=set_aside,
    )
    if not judged.convicted:
        return judged
    error = given - sent
    unit = unit_roundoff(points.side.dtype) * sent.square().mean(2, keepdim=True).sqrt()
    sample = Sample.of(rows, error, (unit / _WRONG).expand_as(error), ratio)
    return replace(judged, sample=sample, parted=_said(given[wrong], normed, wrong))


def _said(given: torch.Tensor, normed: torch.Tensor, wrong: torch.Tensor) -> str:
    """Say how many slots ([row, slot] in ``wrong``) have another input, and of whom."""
    inputs = {row.numpy().tobytes() for row in normed}
    others = sum(row.numpy().tobytes() in inputs for row in given)
    return (
        f"{len(given)} of {wrong.numel()} slots hold another input than their row's own, {others} "
        "of them another row's; a copy has no rounding"
    )
