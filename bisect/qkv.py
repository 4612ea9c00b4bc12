"""Tell rotary embedding, q/k norm and projection apart in wrong queries or keys.

The three lie between two visible points. A rotation keeps the length of each pair of channels that
it turns; a norm scales each head as a whole and each channel by its weight; a wrong projection does
neither.
"""

from __future__ import annotations

import torch

from layerbisect.bisect.measure import MEDIAN_RATIO, OwnError, measure
from layerbisect.bisect.operators import LayerPoints
from layerbisect.bisect.precision import Precision
from layerbisect.bisect.residuals import unit_roundoff

_ITERATIONS = 8


def part(points: LayerPoints, suffix: str, convicted: OwnError) -> tuple[str, str]:
    """Name the operator behind a convicted ``attn.q`` or ``attn.k``, and the evidence for it."""
    captured = points.captured(suffix)
    assert captured is not None
    low = Precision.all_in(getattr(torch, points.side.dtype))
    rows = convicted.flat_rows
    exact, rounded = (points.compute(suffix, precision)[rows] for precision in (Precision(), low))
    lengths = measure(
        point=convicted.point,
        layer=convicted.layer,
        operator="rope",
        side=convicted.side,
        captured=_pair_lengths(captured[rows]),
        exact=_pair_lengths(exact),
        low=_pair_lengths(rounded),
        unit=unit_roundoff(points.side.dtype),
        directions={},
        covers=("rope",),
        flat_rows=rows,
    )
    if not lengths.beyond_rounding:
        return "rope", (
            "the lengths of the rotated pairs are right "
            f"({lengths.ratio:.1f}x rounding) and their angles are not"
        )
    if points.model.config.qk_norm:
        misfit = _misfit_of_a_norm(points, suffix, captured, rows)
        if misfit < MEDIAN_RATIO:
            return "norm", (
                "a scale by head and a weight by channel explain it all "
                f"(what is left is {misfit:.1f}x rounding)"
            )
    return "linear", "neither a rotation nor a norm explains it"


def _pair_lengths(x: torch.Tensor) -> torch.Tensor:
    """Lengths of the channel pairs that half-style rotary embedding turns: [row, head, pair]."""
    half = x.shape[-1] // 2
    return torch.hypot(x[..., :half], x[..., half:])


def _misfit_of_a_norm(
    points: LayerPoints, suffix: str, captured: torch.Tensor, rows: torch.Tensor
) -> float:
    """Fit captured = raw * scale[row, head] * weight[channel], and measure what is left.

    Returns the median over rows of the misfit in units of the dtype's rounding of the values
    themselves, three roundings being the least that norm and rotation make.
    """
    positions = torch.from_numpy(points.side.chains.position)
    normed = points.get("attn.norm")
    raw = points.model.qkv_raw(points.layer, normed)[0 if suffix == "attn.q" else 1][rows].double()
    turned_back = points.model.rotate(captured, positions, inverse=True)[rows].double()
    scale = torch.ones(*raw.shape[:2], 1, dtype=raw.dtype)
    weight = torch.ones(raw.shape[2], dtype=raw.dtype)
    for _ in range(_ITERATIONS):
        base = raw * weight
        scale = (turned_back * base).sum(-1, keepdim=True) / base.square().sum(
            -1, keepdim=True
        ).clamp_min(1e-30)
        base = raw * scale
        weight = (turned_back * base).sum((0, 1)) / base.square().sum((0, 1)).clamp_min(1e-30)
    left = (turned_back - raw * scale * weight).square().mean((1, 2)).sqrt()
    size = turned_back.square().mean((1, 2)).sqrt()
    rounding = 3**0.5 * 0.4 * unit_roundoff(points.side.dtype)
    return float((left / (rounding * size.clamp_min(1e-30))).median())
