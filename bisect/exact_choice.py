"""Own error of what has no size: a copy or a choice, which is right in a row or wrong."""

from __future__ import annotations

import torch

from layerbisect.bisect.operators import LayerPoints
from layerbisect.kernels.judging.measure import quantile
from layerbisect.kernels.judging.own_error import EXCESS_RATIO, OwnError


def error_of_rows(
    points: LayerPoints,
    suffix: str,
    rows: torch.Tensor,
    ratio: torch.Tensor,
    *,
    nonfinite: int = 0,
    set_aside: int = 0,
) -> OwnError:
    """Sum up how wrong each of ``rows`` (int64 [row]) is: ``ratio`` [row], 0 where it is right.

    The low-precision reference makes no such error, so the floor is none.
    """
    return OwnError(
        point=points.name(suffix),
        layer=points.layer,
        operator=points.operator(suffix),
        side=points.side.label,
        rows=len(rows),
        ratio=quantile(ratio, 0.95),
        floor=0.0,
        median=quantile(ratio, 0.5),
        excess=float((ratio > EXCESS_RATIO).double().mean()) if len(ratio) else 0.0,
        nonfinite=nonfinite,
        fits=(),
        covers=points.covers(suffix),
        set_aside=set_aside,
        row_ratio=ratio,
        flat_rows=rows,
    )
