"""Tell rotary embedding, q/k norm and projection apart in wrong queries or keys.

The three lie between two visible points. A rotation keeps the length of each pair of channels that
it turns; a norm scales each head as a whole and each channel by its weight; a wrong projection does
neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from layerbisect.bisect.norm_eps import apart, others_err_by, scaled_or_shrunk
from layerbisect.bisect.operators import LayerPoints
from layerbisect.bisect.precision import FULL
from layerbisect.bisect.side_culprits import is_everywhere
from layerbisect.kernels.judging.measure import Output, measure
from layerbisect.kernels.judging.own_error import EXCESS_RATIO, EXCESS_ROWS, MEDIAN_RATIO, OwnError
from layerbisect.kernels.judging.residuals import unit_roundoff
from layerbisect.kernels.judging.where import heads_in_error

_ITERATIONS = 8
# a turn that is the same everywhere shows in the first few sequences
_SEQUENCES = 8
_SEQUENCE_ROWS = 256
_TINY = 1e-30
_SAME_FACTOR = 1e-4
"""Two factors that differ by less are one."""
_EITHER = ("norm", "rope")
"""What made queries and keys err where the q/k norms and the rotation explain it equally."""


def part(points: LayerPoints, errors: Sequence[OwnError]) -> list[OwnError]:
    """Name the operator behind convicted queries and keys of a layer, as far as it can be told.

    ``errors`` are those of all the layer's operators, which are returned.
    """
    suffixes = {points.name(suffix): suffix for suffix in ("attn.q", "attn.k")}
    return [
        _parted(points, suffixes[error.point], error, errors)
        if error.point in suffixes and error.convicted and error.rows
        else error
        for error in errors
    ]


def _parted(
    points: LayerPoints, suffix: str, convicted: OwnError, errors: Sequence[OwnError]
) -> OwnError:
    operator, why = _part(points, suffix, convicted, errors)
    if not why:
        # the projection before them is right
        return replace(convicted, operator="norm", covers=_EITHER)
    if operator == "linear" and points.hidden(suffix):
        # the norm before the projection is not seen either
        return convicted
    return replace(convicted, operator=operator, parted=why)


def _part(
    points: LayerPoints, suffix: str, convicted: OwnError, errors: Sequence[OwnError]
) -> tuple[str, str]:
    """Name the operator, and say why; "" where it may be the q/k norms or the rotation."""
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
    turned = (
        "the lengths of the rotated pairs are right "
        f"({lengths.ratio:.1f}x rounding) and their angles are not"
    )
    # what nothing but a gain convicts is not known to be turned
    if not lengths.convicted and (convicted.far_off or convicted.nonfinite):
        return "rope", turned
    hit = convicted.row_ratio > EXCESS_RATIO
    rows = rows[hit] if int(hit.sum()) >= EXCESS_ROWS else rows
    paired = _in_neighbours(points, suffix, rows) if lengths.convicted else ""
    if paired:
        return "rope", paired
    factor, rounding = _same_factor(points, suffix, rows)
    if factor is not None:
        cause, change = scaled_or_shrunk(points, factor, rows, rounding)
        if cause == "rope":
            return "rope", (
                f"all queries and keys are {factor:.4g} times what they should be, alike: cosine "
                "and sine are (a scaled embedding's attention factor), for q/k norms and "
                "projections are two each"
            )
        if cause == "norm":
            return "norm", (
                f"an eps of both q/k norms that is off by {change:+.4g} explains it, and a factor "
                "that is the same for all queries and keys does not"
            )
        if others_err_by(points, change, errors):
            return "norm", (
                f"an eps of both q/k norms that is off by {change:+.4g} explains it, and another "
                "norm of the layer errs by the same"
            )
        return "norm", ""
    if not lengths.convicted:
        return "rope", turned
    if points.model.config.qk_norm:
        # of rows and heads that are right, a norm explains all, with other weights; one head's
        # weight by channel explains a wrong channel of its projection, too
        guilty = heads_in_error(convicted)
        heads = guilty if guilty[1:] else list(range(captured.shape[1]))
        # what no norm explains of the low-precision reference is the measure of rounding
        misfit, rounding = (
            _misfit_of_a_norm(points, suffix, values, rows, heads) for values in (captured, low)
        )
        if misfit < MEDIAN_RATIO * rounding:
            return "norm", (
                "a scale by head and a weight by channel explain it all "
                f"(what is left is {misfit / rounding:.1f}x rounding)"
            )
        late = _misfit_of_a_norm(points, suffix, captured, rows, heads, after_rotation=True)
        if late < MEDIAN_RATIO * rounding:
            return "norm", (
                "a norm after the rotation, and not before it, explains it all "
                f"(what is left is {late / rounding:.1f}x rounding)"
            )
    return "linear", "neither a rotation nor a norm explains it"


def settled(errors: Sequence[OwnError]) -> list[OwnError]:
    """Let layers that tell the q/k norms from the rotation speak for those of a side that cannot.

    ``errors`` are those of all layers, which are returned. They speak where they are most layers.
    """
    told = [e for e in errors if e.parted and not e.acquitted and e.operator in _EITHER]
    named = {e.operator for e in told}
    layers = len({e.layer for e in errors})
    if len(named) != 1 or not is_everywhere(len({e.layer for e in told}), layers):
        return list(errors)
    operator = named.pop()
    why = f"q/k norms and rotation explain it equally here, and in other layers {operator} alone"
    return [replace(e, operator=operator, parted=why) if e.covers == _EITHER else e for e in errors]


def _in_neighbours(points: LayerPoints, suffix: str, rows: torch.Tensor) -> str:
    """Say that the rotary embedding turned other pairs of channels, "" where it did not."""
    captured, exact = points.captured(suffix), points.compute(suffix)
    assert captured is not None
    positions = torch.from_numpy(points.side.chains.position)
    before = points.model.rotate(exact, positions, inverse=True)
    found = apart(_neighbour_lengths(captured[rows]), _neighbour_lengths(before[rows]))
    if found >= _rounding(points, suffix, rows):
        return ""
    return (
        "the lengths of neighbouring channels are right as they were before the rotation: it "
        "turned channels 2i and 2i+1 together, not i and i + half"
    )


def _same_factor(
    points: LayerPoints, suffix: str, rows: torch.Tensor
) -> tuple[float | None, float]:
    """Find the factor by which all queries and keys are off alike, None where there is none.

    Returned with by how much rounding sets values apart.
    """
    rounding = _rounding(points, suffix, rows)
    factors = []
    for name in ("attn.q", "attn.k"):
        values, right = points.captured(name), points.compute(name)
        if values is None:
            return None, rounding
        values, right = values[rows].double(), right[rows].double()
        factors.append(float((values * right).sum() / right.square().sum().clamp_min(_TINY)))
        if apart(values, factors[-1] * right) >= rounding:
            return None, rounding
    first, second = factors
    same = max(unit_roundoff(points.side.dtype), _SAME_FACTOR) * abs(first)
    return (first if abs(first - second) <= same else None), rounding


def _rounding(points: LayerPoints, suffix: str, rows: torch.Tensor) -> float:
    low = points.compute(suffix, points.side.low)
    return MEDIAN_RATIO * apart(low[rows], points.compute(suffix)[rows])


def acquit_shared_turn(points: LayerPoints, errors: Sequence[OwnError]) -> list[OwnError]:
    """Acquit queries and keys that are turned by one and the same angle more than they should be.

    Attention sees their products, which depend on the difference of positions alone: positions
    that start elsewhere, as under left padding, change q and k and nothing after them.
    """
    turned = [e for e in errors if e.convicted and e.operator == "rope" and e.parted]
    if len(turned) < 2 or not _products_are_right(points):
        return list(errors)
    why = (
        "queries and keys are turned by the same angle more (positions that start elsewhere, as "
        "under left padding), which attention does not see"
    )
    return [replace(e, acquitted=why, fits=()) if e in turned else e for e in errors]


def _products_are_right(points: LayerPoints) -> bool:
    """Whether the products of queries with the keys before them are right within rounding."""
    q, k = points.captured("attn.q"), points.captured("attn.k")
    assert q is not None and k is not None
    low = points.side.low
    exact_q, exact_k = points.compute("attn.q"), points.compute("attn.k")
    low_q, low_k = points.compute("attn.q", low), points.compute("attn.k", low)
    start, error, rounding = 0, [], []
    for length in points.side.chains.lengths[:_SEQUENCES]:
        rows = slice(start, start + min(length, _SEQUENCE_ROWS))
        start += length
        exact = _products(exact_q[rows], exact_k[rows])
        error.append((_products(q[rows], k[rows]) - exact).square().sum((1, 2)))
        rounding.append((_products(low_q[rows], low_k[rows]) - exact).square().sum((1, 2)))
    ratio = torch.stack(error).sum(0) / torch.stack(rounding).sum(0).clamp_min(_TINY)
    return float(ratio.max().sqrt()) < MEDIAN_RATIO


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Causal products of one sequence: [head, row, row], 0 above the diagonal."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("rhc,shc->hrs", q, k).tril()


def _pair_lengths(x: torch.Tensor) -> torch.Tensor:
    """Lengths of the channel pairs that half-style rotary embedding turns: [row, head, pair]."""
    half = x.shape[-1] // 2
    return torch.hypot(x[..., :half], x[..., half:])


def _neighbour_lengths(x: torch.Tensor) -> torch.Tensor:
    """Lengths of the channel pairs that interleaved rotary embedding turns: [row, head, pair]."""
    return torch.hypot(x[..., ::2], x[..., 1::2])


def _misfit_of_a_norm(
    points: LayerPoints,
    suffix: str,
    values: torch.Tensor,
    rows: torch.Tensor,
    heads: list[int],
    *,
    after_rotation: bool = False,
) -> float:
    """Fit values = raw * scale[row, head] * weight[channel], and measure what is left.

    The values are turned back first; or, where the norm may have come ``after_rotation``, what was
    projected is turned. Returns the median over rows of what is left, relative to the values' size.
    """
    positions = torch.from_numpy(points.side.chains.position)
    normed = points.get("attn.norm")
    which = 0 if suffix == "attn.q" else 1
    raw = points.model.qkv_raw(points.layer, normed, precision=FULL)[which]
    if after_rotation:
        raw = points.model.rotate(raw, positions)
    else:
        values = points.model.rotate(values, positions, inverse=True)
    raw, values = raw[rows][:, heads].double(), values[rows][:, heads].double()
    weight = torch.ones(raw.shape[2], dtype=raw.dtype)
    for _ in range(_ITERATIONS):
        base = raw * weight
        scale = _regress(values, base, (-1,))
        base = raw * scale
        weight = _regress(values, base, (0, 1))
    left = (values - raw * scale * weight).square().mean((1, 2)).sqrt()
    size = values.square().mean((1, 2)).sqrt()
    return float((left / size.clamp_min(_TINY)).median())


def _regress(values: torch.Tensor, base: torch.Tensor, over: tuple[int, ...]) -> torch.Tensor:
    along = (values * base).sum(over, keepdim=True)
    return along / base.square().sum(over, keepdim=True).clamp_min(_TINY)
