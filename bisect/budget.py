"""Rounding budget: what gap is normal for this model, on these tokens, in this dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from layerbisect.bisect.precision import FULL, KINDS, Precision
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.bisect.verdict import RoundingBudget

GAP_FACTOR = 1.5
"""A gap up to this many times what rounding predicts is explained by rounding."""


def rounding_budget(
    model: ReferenceModel,
    sides: tuple[Side, Side],
    progress: Callable[[int, int], None] | None = None,
) -> RoundingBudget:
    """Run the reference once in full, once in each side's dtype, and once with each kind rounded.

    The shares are of the lower precision of the two sides. Roundings of two engines are taken to
    be independent, so the predicted gap is the root of the summed squares of both sides' distances
    from full precision, as the low-precision reference has them; it is that reference's and not
    the measured distances', because a fault moves these.
    """
    chains = sides[0].chains
    position = torch.from_numpy(chains.position)
    target = torch.from_numpy(chains.target)
    scored = torch.from_numpy(chains.scored)
    token = torch.from_numpy(chains.token)
    dtypes = {side.label: getattr(torch, side.dtype) for side in sides}
    lowest = max(dtypes.values(), key=lambda dtype: torch.finfo(dtype).eps)
    kinds = [kind for kind in KINDS if _has(model, kind)]
    runs: dict[str, Precision] = {"full": FULL}
    runs |= {str(dtype): Precision.all_in(dtype) for dtype in set(dtypes.values())}
    runs |= {kind: Precision.only(kind, lowest) for kind in kinds}
    ends: dict[str, torch.Tensor] = {}
    for done, (name, precision) in enumerate(runs.items(), 1):
        embedded = model.embed(token, precision=precision)
        ends[name] = model.tail(
            0, embedded, position, chains.lengths, target, precision=precision
        ).double()
        if progress is not None:
            progress(done, len(runs))
    full = ends["full"]

    def distance(other: torch.Tensor) -> float:
        difference = (other - full)[scored].abs()
        return float(difference[difference.isfinite()].mean())

    shares = {kind: distance(ends[kind]) if kind in ends else 0.0 for kind in KINDS}
    return RoundingBudget(
        predicted_gap=math.hypot(*(distance(ends[str(dtype)]) for dtype in dtypes.values())),
        shares=shares,
        whole=distance(ends[str(lowest)]),
        quadrature=math.sqrt(sum(share**2 for share in shares.values())),
        distances={side.label: distance(side.scores()) for side in sides},
        rows=int(scored.sum()),
    )


def _has(model: ReferenceModel, kind: str) -> bool:
    return bool(model.config.moe_layers) or kind not in ("router", "experts")
