"""Carried gap: the disagreement that the state at a layer boundary carries, in nats.

At a boundary both sides' hidden states are run through one common tail, the reference model from
that layer on, and the log-probs that it ends with are compared. Over the boundaries the carried gap
goes from nothing to the whole gap; a step is what one layer contributed. It is blind neither to a
small error that later layers amplify nor to a large one that they ignore.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side, boundary

Mode = Literal["scan", "search"]


@dataclass(frozen=True, slots=True)
class CarriedGap:
    """Mean absolute difference (nat) read out at each probed boundary, by boundary number.

    ``forwards`` counts the tails that were run, one a side and boundary; ``mode`` says whether
    every visible boundary was probed or a search chose them. Independent contributions add in
    squares, so a layer's share of the gap is a difference of squares.
    """

    at: dict[int, float]
    mode: Mode
    forwards: int


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

    ``scan`` probes every visible boundary, at a cost of about half a forward of the model a side
    and boundary. ``search`` probes the ends and then goes on halving the interval with the largest
    step, until that is a single layer: about log2 of the layers in probes for one culprit. It can
    miss contributions that cancel inside an interval; a scan cannot. ``progress`` is called with
    probes done and, as far as known, to do.
    """
    layers = model.config.num_layers
    visible = visible_boundaries(sides, layers)
    at: dict[int, float] = {}

    def probe(layer: int, expected: int) -> None:
        if layer not in at:
            first, second = read_out(model, sides, layer)
            at[layer] = float((first - second).abs().nanmean())
            if progress is not None:
                progress(len(at), max(expected, len(at)))

    if mode == "scan" or len(visible) <= 3:
        for layer in visible:
            probe(layer, len(visible))
    else:
        expected = 2 + 2 * len(visible).bit_length()
        probe(visible[0], expected)
        probe(visible[-1], expected)
        _search(at, visible, lambda layer: probe(layer, expected))
    return CarriedGap(at, mode, 2 * len(at))


def _search(at: dict[int, float], visible: list[int], probe: Callable[[int], None]) -> None:
    while True:
        probed = sorted(at)
        gaps = [
            (at[b] ** 2 - at[a] ** 2, a, b)
            for a, b in zip(probed, probed[1:], strict=False)
            if visible.index(b) - visible.index(a) > 1
        ]
        whole = max(at[probed[-1]] ** 2, 1e-300)
        # an interval is worth halving while it makes a fifth of the gap or more
        open_steps = [(step, a, b) for step, a, b in gaps if step > 0.2 * whole]
        if not open_steps:
            return
        _, a, b = max(open_steps)
        probe(visible[(visible.index(a) + visible.index(b)) // 2])


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
