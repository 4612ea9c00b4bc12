"""Tell rotary embedding, q/k norm and projection apart in wrong queries or keys.

The three lie between two visible points. A rotation keeps the length of each pair of channels that
it turns; a norm scales each head as a whole and each channel by its weight; a wrong projection does
neither.
"""

from __future__ import annotations

import torch

from layerbisect.bisect.measure import MEDIAN_RATIO, Output, OwnError, measure
from layerbisect.bisect.operators import LayerPoints
from layerbisect.bisect.precision import FULL

_ITERATIONS = 8
_TINY = 1e-30


def part(points: LayerPoints, suffix: str, convicted: OwnError) -> tuple[str, str]:
    """Name the operator behind a convicted ``attn.q`` or ``attn.k``, and the evidence for it."""
    captured = points.captured(suffix)
    assert captured is not None
    rows = convicted.flat_rows
    exact, low = points.compute(suffix), points.compute(suffix, points.side.low)
    lengths = measure(
        Output(
            point=convicted.point,
            layer=convicted.layer,
            operator="rope",
            side=convicted.side,
            dtype=points.side.dtype,
            captured=_pair_lengths(captured[rows]),
            exact=_pair_lengths(exact[rows]),
            low=_pair_lengths(low[rows]),
            flat_rows=rows,
            covers=("rope",),
            gains=("all", "head"),
        )
    )
    if not lengths.convicted:
        return "rope", (
            "the lengths of the rotated pairs are right "
            f"({lengths.ratio:.1f}x rounding) and their angles are not"
        )
    if points.model.config.qk_norm:
        # what no norm explains of the low-precision reference is the measure of rounding
        misfit, rounding = (
            _misfit_of_a_norm(points, suffix, values, rows) for values in (captured, low)
        )
        if misfit < MEDIAN_RATIO * rounding:
            return "norm", (
                "a scale by head and a weight by channel explain it all "
                f"(what is left is {misfit / rounding:.1f}x rounding)"
            )
    return "linear", "neither a rotation nor a norm explains it"


def _pair_lengths(x: torch.Tensor) -> torch.Tensor:
    """Lengths of the channel pairs that half-style rotary embedding turns: [row, head, pair]."""
    half = x.shape[-1] // 2
    return torch.hypot(x[..., :half], x[..., half:])


def _misfit_of_a_norm(
    points: LayerPoints, suffix: str, values: torch.Tensor, rows: torch.Tensor
) -> float:
    """Fit values = raw * scale[row, head] * weight[channel], and measure what is left.

    Returns the median over rows of what is left, relative to the values' size.
    """
    positions = torch.from_numpy(points.side.chains.position)
    normed = points.get("attn.norm")
    which = 0 if suffix == "attn.q" else 1
    raw = points.model.qkv_raw(points.layer, normed, precision=FULL)[which][rows].double()
    turned_back = points.model.rotate(values, positions, inverse=True)[rows].double()
    weight = torch.ones(raw.shape[2], dtype=raw.dtype)
    for _ in range(_ITERATIONS):
        base = raw * weight
        scale = _regress(turned_back, base, (-1,))
        base = raw * scale
        weight = _regress(turned_back, base, (0, 1))
    left = (turned_back - raw * scale * weight).square().mean((1, 2)).sqrt()
    size = turned_back.square().mean((1, 2)).sqrt()
    return float((left / size.clamp_min(_TINY)).median())


def _regress(values: torch.Tensor, base: torch.Tensor, over: tuple[int, ...]) -> torch.Tensor:
    along = (values * base).sum(over, keepdim=True)
    return along / base.square().sum(over, keepdim=True).clamp_min(_TINY)
