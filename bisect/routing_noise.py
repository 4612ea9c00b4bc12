"""What rounding alone makes of router logits, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch

from layerbisect.bisect.precision import FULL, Precision
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.routing_flips import logits_differ
from layerbisect.bisect.selection import expert_sets
from layerbisect.bisect.side import Side
from layerbisect.kernels.judging.residuals import order_freedom

_WANTED = ("mlp.router_logits", "mlp.expert_ids", "output")


def predicted_noise(
    model: ReferenceModel,
    sides: tuple[Side, Side],
    layers: Collection[int],
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, float]:
    """Predict by how much rounding makes two sides' router logits differ in each of ``layers``.

    The reference runs in full and as each side rounds, from the embedding on, and the two sides'
    distances from full precision add in squares. Rows that rounding re-routed in an earlier layer
    are left out, for their logits differ by more than rounding; a layer in which that is every row
    is left out, too. Standard deviations, of one expert's logit. No capture is read, so a fault
    does not widen what counts as rounding.
    """
    chains = sides[0].chains
    token, position = torch.from_numpy(chains.token), torch.from_numpy(chains.position)
    fresh = torch.from_numpy(chains.fresh)
    dtypes = list(dict.fromkeys(side.dtype for side in sides))
    runs = [FULL, *(Precision.all_in(getattr(torch, dtype)) for dtype in dtypes)]
    streams = [model.embed(token, precision=precision) for precision in runs]
    kept = [fresh.clone() for _ in dtypes]
    found: dict[int, float] = {}
    last = max(layers, default=-1)
    for layer in range(last + 1):
        steps = [
            model.layer(layer, x, position, chains.lengths, precision=precision, want=_WANTED)
            for x, precision in zip(streams, runs, strict=True)
        ]
        streams = [step["output"] for step in steps]
        if progress is not None:
            progress(layer + 1, last + 1)
        if not model.config.is_sparse(layer):
            continue
        full, *lows = steps
        distance: dict[str, float] = {}
        for dtype, low, rows in zip(dtypes, lows, kept, strict=True):
            scale = logits_differ(low["mlp.router_logits"][rows], full["mlp.router_logits"][rows])
            if scale is not None:
                distance[dtype] = scale * order_freedom(dtype)
            sets = [expert_sets(s["mlp.expert_ids"], model.config.experts) for s in (low, full)]
            rows &= (sets[0] == sets[1]).all(1)
        if layer in layers and len(distance) == len(dtypes):
            found[layer] = math.hypot(*(distance[side.dtype] for side in sides))
    return found
