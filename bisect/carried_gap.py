"""Carried gap: the disagreement that the state at a layer boundary carries, in nats.

At a boundary both sides' hidden states are run through one common tail, the reference model from
that layer on, and the log-probs that it ends with are compared. Over the boundaries the carried gap
goes from nothing to the whole gap; a step is what one layer contributed. It is blind neither to a
small error that later layers amplify nor to a large one that they ignore.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from layerbisect.bisect.budget import GAP_FACTOR
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.bisect.verdict import Tail
from layerbisect.captures.boundary_search import Mode, probe_boundaries
from layerbisect.captures.points import boundary


@dataclass(frozen=True, slots=True)
class CarriedGap:
    """Mean absolute difference (nat) read out at each probed boundary, by boundary number.

    ``forwards`` counts the tails that were run, one a side and boundary by the reference; ``mode``
    says whether every visible boundary was probed or a search chose them. Independent
    contributions add in squares, so a layer's share of the gap is a difference of squares.
    ``tokens`` has each boundary's absolute differences (nat, float32 [token]) in the order of
    `read_out`; a live trainer tells none.
    """

    at: dict[int, float]
    mode: Mode
    forwards: int
    tail: Tail = "reference"
    tokens: Mapping[int, NDArray[np.float32]] = field(default_factory=dict, compare=False)

    def floor(self, predicted: float, freedom: float) -> float:
        """Up to which gap (nat) the tail's own rounding may make all of it.

        The reference runs in full precision. A trainer as the tail rounds anew on states that
        differ by little, so from the first boundary on it makes about the gap that rounding makes
        between two engines, wherever the states come from. That is measured: the largest gap that
        rounding explains, or what is ``predicted`` (nat) where none is so small. ``freedom`` is how
        many times wider rounding may be than predicted.
        """
        if self.tail == "reference" or not math.isfinite(predicted):
            return 0.0
        allowed = GAP_FACTOR * freedom * predicted
        return max((g for n, g in self.at.items() if n and g <= allowed), default=predicted)


def visible_boundaries(sides: tuple[Side, Side], num_layers: int) -> list[int]:
    """List the boundaries at which both sides show the residual stream."""
    return [
        layer
        for layer in range(num_layers + 1)
        if all(side.has(boundary(layer, num_layers)) for side in sides)
    ]


def carried_gap(
    model: ReferenceModel,
    sides: tuple[Side, Side],
    *,
    mode: Mode,
    progress: Callable[[int, int], None] | None = None,
) -> CarriedGap:
    """Probe boundaries and read out what each carries.

    A probe costs about half a forward of the model a side. ``mode`` and ``progress`` are as
    :func:`layerbisect.captures.boundary_search.probe_boundaries` has them.
    """
    visible = visible_boundaries(sides, model.config.num_layers)

    tokens: dict[int, NDArray[np.float32]] = {}

    def probe(layer: int) -> float:
        first, second = read_out(model, sides, layer)
        apart = (first - second).abs()
        tokens[layer] = apart.float().numpy()
        return float(apart.nanmean())

    at = probe_boundaries(visible, mode, probe, progress)
    return CarriedGap(at, mode, 2 * len(at), tokens=dict(sorted(tokens.items())))


def read_out(
    model: ReferenceModel, sides: tuple[Side, Side], layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read both sides' state at a boundary out in log-probs (float64 [token] each, nat).

    Only tokens that count once are returned: each scored token of the joined sequences.
    """
    chains = sides[0].chains
    scored = torch.from_numpy(chains.scored)
    streams = []
    for side in sides:
        stream = side.stream(layer, model.config.num_layers)
        if stream is None:
            raise ValueError(f"{side.label} does not show boundary {layer}")
        streams.append(stream)
    # both in one forward: half as many kernels, each on twice the rows
    ends = model.tail(
        layer,
        torch.cat(streams),
        torch.from_numpy(chains.position).repeat(2),
        chains.lengths * 2,
        torch.from_numpy(chains.target).repeat(2),
    )
    first, second = ends.double().chunk(2)
    return first[scored], second[scored]
