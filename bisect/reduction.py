"""The rounding that tensor parallelism adds: partial sums are stored, and added on the way."""

from __future__ import annotations

import torch

from layerbisect.bisect.operators import LayerPoints
from layerbisect.kernels.judging.residuals import ONE_ROUNDING, typical_square, unit_roundoff

_SUMMED = {
    "attn.out": "attn.out",
    "mid": "attn.out",
    "mlp.expert_out": "mlp.expert_out",
    "mlp.out": "mlp.out",
    "output": "mlp.out",
}


def reduction_variance(points: LayerPoints, suffix: str, rows: torch.Tensor) -> torch.Tensor | None:
    """Variance ([row, channel]) that adding the ranks' partial sums puts on a point; None if none.

    Each of n ranks stores its part in the engine's dtype, which together loses as much as one more
    rounding of the sum, and a ring adds them one by one, rounding each time. Where a capture holds
    the parts, its reader has added them at once: then the ring's roundings first show behind them,
    in the residual stream.
    """
    ranks = points.side.reducing_ranks
    summed = _SUMMED.get(suffix, "")
    if summed == "mlp.expert_out":
        ranks = points.side.capture.info.parallel.get("etp", 1)
    elif summed == "mlp.out" and points.combined:
        # the parts of an expert were added before, and experts are added where all of them are
        return None
    if ranks == 1 or not summed:
        return None
    seen = points.side.capture.points.get(points.name(summed))
    parts_held = seen is not None and seen.how == "partial_sum"
    stored, ring = 1.0, sum(count / ranks for count in range(2, ranks + 1))
    if suffix == summed:
        roundings = stored if parts_held else stored + ring
    elif points.captured(summed) is None:
        roundings = stored + ring
    else:
        roundings = 1.0 + ring if parts_held else 0.0
    if not roundings:
        return None
    one = ONE_ROUNDING * unit_roundoff(points.side.dtype)
    return roundings * one**2 * typical_square(points.get(summed)[rows])
