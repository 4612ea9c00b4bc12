"""Operator bundles from a capture: what a layer's operators were given, with the model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from layerbisect.bisect.gate import check_dtype, check_model_fits
from layerbisect.bisect.join import join
from layerbisect.bisect.operators import STEPS, LayerPoints
from layerbisect.bisect.own_error import observations
from layerbisect.bisect.reduction import reduction_variance
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from layerbisect.kernels.replay.bundle import Bundle, Call

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
