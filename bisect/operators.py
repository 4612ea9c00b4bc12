"""The operators of a decoder layer: which point each makes, from which points, by the reference.

A point that an engine does not show is recomputed from the last ones that it does show; what is
judged then is the whole stretch in between, and the check says which operators it covers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from layerbisect.bisect.precision import FULL, Precision
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.captures.format import RoutesFrom
from layerbisect.captures.points import boundary
from layerbisect.kernels.experts import combine
from layerbisect.kernels.judging.residuals import unique_rows
from layerbisect.kernels.rounding import rounded, shifted_grid

Compute = Callable[["LayerPoints", Precision], torch.Tensor]

_BY_SLOT = ("mlp.expert_weights", "mlp.expert_in", "mlp.expert_out")


@dataclass(frozen=True, slots=True)
class Step:
    """How a point follows: its operator in a sparse and in a dense layer, its inputs."""

    operator: str
    inputs: tuple[str, ...]
    compute: Compute


def _qkv(which: int) -> Compute:
    def compute(points: LayerPoints, precision: Precision) -> torch.Tensor:
        return points.qkv(precision)[which]

    return compute


STEPS: dict[str, Step] = {
    "attn.norm": Step(
        "norm", ("input",), lambda p, c: p.model.attn_norm(p.layer, p.get("input", c), precision=c)
    ),
    # projection, q/k norm and rotation in one: bisect.qkv tells them apart
    "attn.q": Step("linear", ("attn.norm",), _qkv(0)),
    "attn.k": Step("linear", ("attn.norm",), _qkv(1)),
    "attn.v": Step("linear", ("attn.norm",), _qkv(2)),
    "attn.context": Step(
        "attention",
        ("attn.q", "attn.k", "attn.v"),
        lambda p, c: p.model.attention(
            p.layer,
            p.get("attn.q", c),
            p.get("attn.k", c),
            p.get("attn.v", c),
            p.side.chains.lengths,
            precision=c,
        ),
    ),
    "attn.out": Step(
        "linear",
        ("attn.context",),
        lambda p, c: p.model.attn_out(p.layer, p.get("attn.context", c), precision=c),
    ),
    "mid": Step(
        "residual",
        ("input", "attn.out"),
        lambda p, c: p.model.residual_add(p.get("input", c), p.get("attn.out", c), precision=c),
    ),
    "mlp.norm": Step(
        "norm", ("mid",), lambda p, c: p.model.mlp_norm(p.layer, p.get("mid", c), precision=c)
    ),
    "mlp.router_logits": Step(
        "router",
        ("mlp.norm",),
        lambda p, c: p.model.router_logits(p.layer, p.get("mlp.norm", c), precision=c),
    ),
    "mlp.expert_ids": Step(
        "router",
        ("mlp.router_logits",),
        lambda p, c: p.model.route(p.layer, p.get("mlp.router_logits", c), precision=c)[0],
    ),
    "mlp.expert_weights": Step(
        "router", ("mlp.router_logits", "mlp.expert_ids"), lambda p, c: p.expert_weights(c)
    ),
    "mlp.expert_in": Step("dispatch", ("mlp.norm",), lambda p, c: p.expert_in(c)),
    "mlp.expert_out": Step(
        "experts",
        ("mlp.expert_in", "mlp.expert_ids", "mlp.expert_weights"),
        lambda p, c: p.model.expert_outputs(
            p.layer,
            p.get("mlp.expert_in", c),
            p.get("mlp.expert_ids", c),
            p.get("mlp.expert_weights", c),
            precision=c,
        ),
    ),
    # in a dense layer, and where what the experts give back is not seen, all of the MLP
    "mlp.out": Step("experts", ("mlp.norm",), lambda p, c: p.mlp_out(c)),
    "output": Step(
        "residual",
        ("mid", "mlp.out"),
        lambda p, c: p.model.residual_add(p.get("mid", c), p.get("mlp.out", c), precision=c),
    ),
}


FORCED: dict[RoutesFrom, tuple[str, ...]] = {
    "own": (),
    "forced": ("mlp.expert_ids",),
    "forced with weights": ("mlp.expert_ids", "mlp.expert_weights"),
}
"""What another capture gave, and no router of this side made."""
_ROUTED = ("mlp.router_logits", "mlp.expert_ids", *_BY_SLOT)
"""What a dense layer has not."""


class LayerPoints:
    """One layer's points on one side: captured where they are, recomputed where they are not."""

    model: ReferenceModel
    side: Side
    layer: int
    sparse: bool

    def __init__(self, model: ReferenceModel, side: Side, layer: int) -> None:
        self.model = model
        self.side = side
        self.layer = layer
        self.sparse = model.config.is_sparse(layer)
        self._captured: dict[str, torch.Tensor | None] = {}
        self._computed: dict[tuple[str, Precision], torch.Tensor] = {}
        self._qkv: dict[Precision, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._distinct: dict[str, torch.Tensor] = {}

    def name(self, suffix: str) -> str:
        """Full name of the point; a layer's output is the next layer's input."""
        last = self.model.config.num_layers
        if suffix == "output":
            return boundary(self.layer + 1, last)
        return f"layers.{self.layer}.{suffix}"

    def captured(self, suffix: str) -> torch.Tensor | None:
        """Read a point ([flat, ...]), or None where the engine does not show it."""
        if suffix not in self._captured:
            self._captured[suffix] = self.side.read(self.name(suffix))
        if suffix in _BY_SLOT and self.captured("mlp.expert_ids") is None:
            # of which expert each slot is, is not known
            return None
        return self._captured[suffix]

    def get(self, suffix: str, precision: Precision = FULL) -> torch.Tensor:
        """Return the captured point, or what follows from the last captured ones before it."""
        captured = self.captured(suffix)
        if captured is None:
            return self.compute(suffix, precision)
        if suffix == "mlp.expert_ids":
            # what is no expert computes nothing
            return torch.where(self.routed(captured)[:, None], captured, -1)
        return captured

    def compute(self, suffix: str, precision: Precision = FULL) -> torch.Tensor:
        """Compute a point by the reference from its inputs."""
        key = (suffix, precision)
        if key not in self._computed:
            self._computed[key] = STEPS[suffix].compute(self, precision)
        return self._computed[key]

    def scaled(self, suffix: str, factor: float) -> LayerPoints:
        """Return the same layer with one point's values multiplied, and what follows from it."""
        changed = LayerPoints(self.model, self.side, self.layer)
        changed._captured = self._captured | {suffix: self.get(suffix) * factor}
        return changed

    def redrawn(self, suffix: str, draws: int) -> list[torch.Tensor]:
        """Compute a point by the low-precision reference under other draws of rounding."""
        found = []
        for draw in range(1, draws + 1):
            again = LayerPoints(self.model, self.side, self.layer)
            again._captured = self._captured
            with shifted_grid(2.0 ** (-draw / (draws + 1))):
                found.append(again.compute(suffix, self.side.low))
        return found

    def hidden(self, suffix: str) -> list[str]:
        """List the points between the last captured ones and this one, which are recomputed."""
        found: list[str] = []
        for before in self._inputs(suffix):
            if before != "input" and self.captured(before) is None:
                found += [n for n in (*self.hidden(before), before) if n not in found]
        return found

    def operator(self, suffix: str) -> str:
        """Name the operator that makes a point."""
        if suffix == "mlp.out" and not self.sparse:
            return "linear"
        return "combine" if suffix == "mlp.out" and self.combined else STEPS[suffix].operator

    @property
    def combined(self) -> bool:
        """Whether what the experts give back is seen, so that it is only added up after it."""
        return self.sparse and self.captured("mlp.expert_out") is not None

    def covers(self, suffix: str) -> tuple[str, ...]:
        """Name the operators between the last captured points and this one, it included."""
        names: list[str] = []
        for point in (*self.hidden(suffix), suffix):
            made = [self.operator(point)]
            if point in ("attn.q", "attn.k"):
                made = ["linear", *(["norm"] if self.model.config.qk_norm else []), "rope"]
            names += [n for n in made if n not in names]
        return tuple(names)

    def _inputs(self, suffix: str) -> tuple[str, ...]:
        if suffix == "mlp.out" and self.combined:
            return ("mlp.expert_out",)
        if suffix == "mlp.out" and self.sparse:
            return ("mlp.norm", "mlp.expert_ids", "mlp.expert_weights")
        return STEPS[suffix].inputs

    def judged(self) -> list[str]:
        """List the points of this layer that can be judged, in the order of computation."""
        if self.captured("input") is None:
            return []
        left_out = self._not_judged()
        return [s for s in STEPS if s not in left_out and self.captured(s) is not None]

    def _not_judged(self) -> set[str]:
        """Name the points that this layer's own operators did not make."""
        if not self.sparse:
            return set(_ROUTED)
        forced = FORCED[self.side.capture.info.routes]
        left_out = set(forced)
        if any(self.captured(suffix) is None for suffix in forced):
            # experts computed with what is not known
            after = ("mlp.expert_out", "mlp.out")
            left_out.add(next((s for s in after if self.captured(s) is not None), "output"))
        return left_out

    def distinct(self, suffix: str) -> torch.Tensor:
        """Places (int64 [n]) with one of each set of rows that are equal at a point."""
        if suffix not in self._distinct:
            rows = self.side.fresh
            self._distinct[suffix] = rows[unique_rows(self.get(suffix)[rows])]
        return self._distinct[suffix]

    def routed(self, ids: torch.Tensor) -> torch.Tensor:
        """Say of each row of IDs (int64 [row, slot]) whether all are experts: bool [row]."""
        return ((ids >= 0) & (ids < self.model.config.experts)).all(1)

    def qkv(self, precision: Precision) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute q, k and v ([flat, head, channel]) from the attention norm's output."""
        if precision not in self._qkv:
            self._qkv[precision] = self.model.qkv(
                self.layer,
                self.get("attn.norm", precision),
                torch.from_numpy(self.side.chains.position),
                precision=precision,
            )
        return self._qkv[precision]

    def expert_weights(self, precision: Precision) -> torch.Tensor:
        """Weigh the chosen experts, in the engine's own slot order: [flat, slot]."""
        logits = self.get("mlp.router_logits", precision)
        ids = self.get("mlp.expert_ids", precision)
        chosen = torch.softmax(logits, -1).gather(-1, ids.clamp_min(0))
        if self.model.config.renormalise:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return rounded(chosen, precision.router)

    def expert_in(self, precision: Precision) -> torch.Tensor:
        """Give each slot of a row the row's own input: [flat, slot, hidden]."""
        normed = self.get("mlp.norm", precision)
        return normed[:, None].expand(-1, self.model.config.top_k, -1)

    def mlp_out(self, precision: Precision) -> torch.Tensor:
        """Run the MLP or the experts, on the captured routes where there are any.

        Where what the experts give back is seen, that is added up.
        """
        if self.combined:
            ids, outputs = self.get("mlp.expert_ids"), self.get("mlp.expert_out")
            return combine(outputs, ids, round_to=precision.experts)
        normed = self.get("mlp.norm", precision)
        if not self.sparse:
            return self.model.mlp(self.layer, normed, precision=precision)
        ids = self.get("mlp.expert_ids", precision)
        weights = self.get("mlp.expert_weights", precision)
        return self.model.mlp(self.layer, normed, ids, weights, precision=precision)
