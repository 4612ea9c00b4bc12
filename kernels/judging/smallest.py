"""The smallest fault that would have been convicted: how far a judgement can see."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from layerbisect.kernels.judging.own_error import MEDIAN_RATIO, SYSTEMATIC_Z
from layerbisect.kernels.judging.residuals import Direction, smallest_beyond


def smallest_fault(
    moved: torch.Tensor,
    error: torch.Tensor,
    error_low: torch.Tensor,
    fitted: Sequence[Direction],
    *,
    least: float = 0.0,
) -> float | None:
    """Return the smallest size of a bug that would have convicted, None if none would.

    ``moved`` [row, head, channel] is what the output moves by in units of its noise by a bug of
    size one, ``error`` and ``error_low`` the errors against both references in the same units. It
    is the smallest of what any of the ``fitted`` directions finds, each of one fit, and of what the
    size of the error shows; never below ``least``.
    """
    found = [smallest_beyond(one, moved, error, error_low, z=SYSTEMATIC_Z) for one in fitted]
    smallest = max(min([_by_size(moved, error), *found]), least)
    return smallest if math.isfinite(smallest) else None


def _by_size(moved: torch.Tensor, error: torch.Tensor) -> float:
    """Return the smallest size that takes the median row beyond rounding.

    Rounding and what the bug adds are independent, so that their squares add up. Which rows are
    beyond is drawn anew with the rounding, so that a few more than half of them are asked for: two
    standard deviations of their number.
    """
    left = (MEDIAN_RATIO**2 - error.square().mean(-1)).clamp_min(0.0)
    # of several heads the worst counts
    by_row = (left / moved.square().mean(-1)).sqrt().flatten(1).amin(1)
    by_row = by_row.nan_to_num(nan=torch.inf, posinf=torch.inf)
    share = min(0.5 + len(by_row) ** -0.5, 1.0)
    return float(by_row.quantile(share, interpolation="higher"))
