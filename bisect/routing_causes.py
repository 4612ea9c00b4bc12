"""Explain the flips of one layer from both sides' router logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from layerbisect.bisect.case import Case
from layerbisect.bisect.operators import LayerPoints
from layerbisect.bisect.routing_flips import causes_of, logits_differ, margins
from layerbisect.bisect.routing_report import CAUSES, Explained, Flip
from layerbisect.bisect.selection import largest, select

EXAMPLES = 5
"""So many flips of a layer are told one by one."""

_INPUTS = ("input", "mid", "mlp.norm")
_TELLING = ("mlp.norm", "mlp.router_logits")
"""What a router reads and what it makes of it: without them its doing is not told from others'."""


@dataclass(frozen=True, slots=True)
class Guilty:
    """What of a layer's router is convicted on one side: its logits, the selection by them.

    Of a side that does not show what its router read, a conviction of its logits is one of the
    whole stretch that ends in them.
    """

    logits: bool
    selection: bool


def explain(
    case: Case,
    layer: int,
    rows: torch.Tensor,
    before: torch.Tensor,
    *,
    guilty: Guilty,
    predicted: float | None,
) -> Explained | None:
    """Explain the flips in ``rows`` (places, int64 [flip]) of a layer.

    Args:
        before: bool [flat], tokens that an earlier layer has re-routed.
        guilty: what of a side's router is convicted by its own error.
        predicted: what rounding is predicted to make the two sides' logits differ by.

    Returns None where a side shows nothing that its router logits follow from.
    """
    points = [LayerPoints(case.model, side, layer) for side in case.sides]
    if not all(any(p.captured(name) is not None for name in _INPUTS) for p in points):
        return None
    lacking = {
        side.label: tuple(s for s in _TELLING if p.captured(s) is None)
        for p, side in zip(points, case.sides, strict=True)
    }
    # of a side with neither, logits are what its whole layer would make
    blind = [len(names) == len(_TELLING) for names in lacking.values()]
    read = not any("mlp.norm" in names for names in lacking.values())
    first, second = (select(p) for p in points)
    fresh, count = case.sides[0].fresh, case.model.config.top_k
    steady = fresh[~before[fresh]]
    differ = logits_differ(first.logits[steady], second.logits[steady])
    # what a few rows differ by is no noise, and neither is what a fault adds
    known = [scale for scale in (differ, predicted) if scale is not None]
    noise = max(math.hypot(first.noise, second.noise), min(known, default=0.0))
    logits = (first.logits[rows], second.logits[rows])
    sets = (first.chosen[rows], second.chosen[rows])
    margin = margins(*sets, logits)
    same = _choose_alike(*logits, count)
    astray = [~made.follows[rows] for made in (first, second)]
    at_fault, unknown = torch.zeros_like(same), torch.zeros_like(same)
    for wrong, hidden in zip(astray, blind, strict=True):
        (unknown if hidden else at_fault).logical_or_(wrong)
    if guilty.selection and not any(blind):
        at_fault |= same
    by_router = torch.zeros_like(at_fault)
    if guilty.logits and read:
        # from what they read, both would have chosen the same
        exact = [p.compute("mlp.router_logits")[rows] for p in points]
        by_router = _choose_alike(exact[0], exact[1], count) & ~at_fault
    cause = causes_of(
        rerouted=before[rows],
        at_fault=at_fault | by_router,
        crossing=~same,
        margin=margin.amax(1),
        noise=noise,
    )
    if guilty.logits and not read:
        # the stretch that is convicted ends in the router, and need not begin there
        unknown |= cause == CAUSES.index("inherited")
    cause[unknown & ~(at_fault | by_router)] = CAUSES.index("not known")
    return Explained(
        causes={name: int((cause == at).sum()) for at, name in enumerate(CAUSES)},
        same_logits=int(same.sum()),
        astray={
            side.label: int((~made.follows[fresh]).sum())
            for made, side, hidden in zip((first, second), case.sides, blind, strict=True)
            if not hidden
        },
        by_router=int(by_router.sum()),
        noise=noise,
        logits_differ=differ,
        examples=_examples(case, rows, sets, margin, cause),
        lacking=lacking,
    )


def _choose_alike(first: torch.Tensor, second: torch.Tensor, count: int) -> torch.Tensor:
    """Whether two sides' logits [row, expert] put the same experts first: bool [row]."""
    return (largest(first, count) == largest(second, count)).all(1)


def _examples(
    case: Case,
    rows: torch.Tensor,
    sets: tuple[torch.Tensor, torch.Tensor],
    margin: torch.Tensor,
    cause: torch.Tensor,
) -> tuple[Flip, ...]:
    unexplained = cause == CAUSES.index("unexplained")
    largest_first = margin.amax(1).argsort(descending=True, stable=True)
    order = torch.cat([largest_first[unexplained[largest_first] == wanted] for wanted in (1, 0)])
    chains = case.joined.chains
    found = []
    for at in order[:EXAMPLES].tolist():
        first, second = (one[at] for one in sets)
        place = int(rows[at])
        sizes = margin[at].tolist()
        found.append(
            Flip(
                position=int(chains.position[place]),
                token=int(chains.token[place]),
                first=tuple((first & ~second).nonzero().flatten().tolist()),
                second=tuple((second & ~first).nonzero().flatten().tolist()),
                margins=(sizes[0], sizes[1]) if bool(margin[at].isfinite().all()) else None,
                cause=CAUSES[int(cause[at])],
            )
        )
    return tuple(found)
