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
    every visible boundary was probed or a search chose them.
    """

    at: dict[int, float]
    mode: Mode
    forwards: int
    num_layers: int

    def steps(self) -> dict[tuple[int, int], float]:
        """Contribution of each interval between probed boundaries, in nat squared.

        Independent contributions add in squares, so that is where a step is a difference. An
        interval that made the gap smaller has a negative one.
        """
        probed = sorted(self.at)
        return {
            (a, b): self.at[b] ** 2 - self.at[a] ** 2
            for a, b in zip(probed, probed[1:], strict=False)
        }

    def share(self, layer: int) -> float | None:
        """A layer's share of the squared gap at the last boundary, if its two ends were probed."""
        whole = self.at.get(self.num_layers, 0.0) ** 2
        if layer not in self.at or layer + 1 not in self.at or whole == 0:
            return None
        return (self.at[layer + 1] ** 2 - self.at[layer] ** 2) / whole


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
            at[layer] = read_out(model, sides, layer)
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
    return CarriedGap(at, mode, 2 * len(at), layers)


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


def read_out(model: ReferenceModel, sides: tuple[Side, Side], layer: int) -> float:
    """Carried gap (mean absolute, nat) at one boundary, over tokens that both sides predict."""
    chains = sides[0].chains
    scored = torch.from_numpy(chains.scored)
    ends = []
    for side in sides:
        stream = side.stream(layer, model.config.num_layers)
        assert stream is not None
        ends.append(
            model.tail(
                layer,
                stream,
                torch.from_numpy(chains.position),
                chains.lengths,
                torch.from_numpy(chains.target),
            )[scored]
        )
    difference = (ends[0] - ends[1]).abs().double()
    finite = difference.isfinite()
    return float(difference[finite].mean()) if finite.any() else float("nan")
