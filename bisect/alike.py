"""Whether two sides' errors at one point are one and the same error."""

from __future__ import annotations

import torch

from layerbisect.kernels.judging.own_error import EXCESS_RATIO, MEDIAN_RATIO, OwnError
from layerbisect.kernels.judging.residuals import row_ratios

ALIKE = 0.5
"""Two sides err alike when their errors differ by less than this share of their size."""
ALIKE_FIT = 0.25
"""The same, of systematic errors under the noise."""


def err_alike(a: OwnError, b: OwnError) -> bool:
    """Whether two sides' errors at one point are one error, up to their own roundings."""
    if a.point != b.point or a.sample is None or b.sample is None:
        return False
    if not (a.far_off or b.far_off):
        # below the noise only the systematic parts can be compared
        theirs = {f.name: f.coefficient for f in b.fits}
        return any(
            f.name in theirs
            and abs(f.coefficient - theirs[f.name])
            < ALIKE_FIT * max(abs(f.coefficient), abs(theirs[f.name]))
            for f in a.fits
        )
    # first by the size of all rows' errors, and then by the errors themselves of some
    at_a, at_b = _common(a.flat_rows, b.flat_rows)
    ratio_a, ratio_b = a.row_ratio[at_a], b.row_ratio[at_b]
    if not len(at_a) or not _near((ratio_a - ratio_b).abs(), ratio_a, ratio_b):
        return False
    at_a, at_b = _common(a.sample.flat_rows, b.sample.flat_rows)
    scale, ours, other = a.sample.noise[at_a], a.sample.error[at_a], b.sample.error[at_b]
    if not len(at_a) or ours.shape != other.shape:
        return False
    apart = row_ratios((ours - other) / scale)
    return _near(apart, row_ratios(ours / scale), row_ratios(other / scale))


def _near(apart: torch.Tensor, ours: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether nearly all rows in excess ([row] each, in units of noise) are near each other."""
    size = torch.maximum(ours, other)
    excess = size > EXCESS_RATIO
    if bool(excess.any()):
        apart, size = apart[excess], size[excess]
    # two roundings apart is as near as they come
    allowed = (ALIKE * size).clamp_min(2**0.5 * MEDIAN_RATIO)
    return bool((apart > allowed).double().mean() < 0.1)


def _common(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in each of two lists ([n] and [m]) the numbers are that both hold."""
    place = {row: i for i, row in enumerate(b.tolist())}
    pairs = [(i, place[row]) for i, row in enumerate(a.tolist()) if row in place]
    both = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
    return both[:, 0], both[:, 1]
