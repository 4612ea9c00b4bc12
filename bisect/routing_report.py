"""What a verdict says about routing: by layer, by cause of a flip, and as parts of the gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Cause = Literal["near tie", "consequence", "inherited", "unexplained", "not known"]
"""Why a token's experts differ between the sides.

``near tie``: each side's choice wins by no more than rounding makes the two sides' logits differ.
``consequence``: an earlier layer had routed the token to other experts. ``inherited``: each choice
follows from its own side's router logits, which really cross, and no router of the layer is
convicted of that: what reached it differs. ``unexplained``: a choice does not follow from its own
side's logits, or what is convicted of the router (its logits, the selection) made the flip.
``not known``: what would tell the router's doing from what came before it was not captured.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)

Group = Literal["same", "context", "rerouted"]
"""Tokens by the row that predicts them: ``same`` where neither it nor a row before it was re-routed
in any layer, ``context`` where only rows before it were, ``rerouted`` where it was itself."""


@dataclass(frozen=True, slots=True)
class Flip:
    """One token whose experts differ in one layer.

    ``first`` and ``second`` are the experts that only this side chose; ``margins`` say for each
    side by how much its own router logits put the best of its own ahead of the worst of the
    other's, None where a side has none that the other lacks.
    """

    position: int
    token: int
    first: tuple[int, ...]
    second: tuple[int, ...]
    margins: tuple[float, float] | None
    cause: Cause


@dataclass(frozen=True, slots=True)
class Explained:
    """Why the flips of a layer are flips.

    ``causes`` add up to them. ``same_logits`` counts flips in which both sides' router logits would
    choose the same experts; ``astray`` counts for each side the rows, flipped or not, whose experts
    do not follow from its own logits; ``by_router`` the flips that a convicted router made.
    ``astray`` leaves out a side of which neither its router's logits nor what it read is seen, and
    ``lacking`` names for each side which of these two points it does not show.
    ``logits_differ`` is how much the two sides' logits differ (a robust standard deviation) over
    rows not re-routed before, None where there are none, and ``noise`` how much of that is
    rounding. ``examples`` are those with the largest margins, unexplained ones first.
    """

    causes: Mapping[Cause, int]
    same_logits: int
    astray: Mapping[str, int]
    by_router: int
    noise: float
    logits_differ: float | None
    examples: tuple[Flip, ...]
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """How two sides route in one layer, over joined rows, each once.

    ``flips`` counts rows whose sets of experts differ, and ``first`` those of them that no earlier
    layer shown had flipped; ``overlap`` is the mean share of its experts that a row has in common.
    ``explained`` is None where nothing flips, or where the captures do not hold what the router
    read. ``weights_mean`` and ``weights_max`` are absolute differences of the weights of experts
    that both sides chose. ``order`` is the share of rows with equal sets whose slots have another
    order, None where a side has no order. ``stream_same`` and ``stream_rerouted`` are the median
    relative difference of the stream that leaves the layer, of tokens routed alike in it and in all
    before, and of the others.
    """

    layer: int
    rows: int
    flips: int
    first: int
    overlap: float
    explained: Explained | None
    weights_mean: float | None
    weights_max: float | None
    order: float | None
    stream_same: float | None
    stream_rerouted: float | None


@dataclass(frozen=True, slots=True)
class RouteGap:
    """Mean absolute log-prob difference (nat) of some tokens; None where there are none."""

    tokens: int
    mae: float | None


@dataclass(frozen=True, slots=True)
class GapSplit:
    """The gap with the rollout's routes forced in the trainer, on the same tokens (nat).

    ``own`` is the gap with the trainer's own routes, ``forced`` with the rollout's, and
    ``forced_with_weights`` with its experts' weights, too; None where that was not captured.
    ``parts`` says what each of them took away, and as ``rest`` what is left. They add up to
    ``own``; one is negative where forcing made the gap larger. ``unchecked`` says,
    in a sentence each, of which forced captures nothing shows that they ran the same weights.
    """

    tokens: int
    own: float
    forced: float | None
    forced_with_weights: float | None
    parts: Mapping[str, float]
    unchecked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Routing:
    """How two sides route, and what it does to their log-probs.

    ``forced`` names the sides whose routes are not their own: they chose nothing.
    """

    layers: tuple[LayerRouting, ...]
    gaps: Mapping[Group, RouteGap]
    forced: tuple[str, ...] = ()
    split: GapSplit | None = None

    @property
    def rows(self) -> int:
        """Routes compared: rows of all layers together."""
        return sum(one.rows for one in self.layers)

    @property
    def flips(self) -> int:
        """Routes that differ."""
        return sum(one.flips for one in self.layers)

    @property
    def causes(self) -> Mapping[Cause, int]:
        """Flips of all layers by cause; those of layers that could not be judged are in none."""
        told = [one.explained.causes for one in self.layers if one.explained is not None]
        return {cause: sum(causes[cause] for causes in told) for cause in CAUSES}
