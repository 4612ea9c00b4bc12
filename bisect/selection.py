"""Whether the experts that an engine chose are those with its largest router logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from layerbisect.bisect.exact_choice import error_of_rows
from layerbisect.bisect.operators import LayerPoints
from layerbisect.bisect.precision import FULL
from layerbisect.kernels.judging.choices import TIE_MARGIN, logits_noise, rounding_of_choice
from layerbisect.kernels.judging.measure import Output, measure
from layerbisect.kernels.judging.own_error import EXCESS_RATIO, EXTREME_RATIO, OwnError, Sample

_INVALID = 1e6


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What one side's router of one layer chose, and by how much others were ahead.

    ``logits`` [flat, expert] are the side's own where it shows them, and else what follows from
    the last points before them that it does; ``chosen`` bool [flat, expert]. ``noise`` is the
    standard deviation of the router's own rounding. ``behind`` [flat] is by how much the best
    expert that was not chosen is ahead of the worst that was, in units of what is allowed, 0 where
    none is; a choice that is none (a number that is no expert's, one expert twice, too few) is
    infinitely far behind. Allowed is `rounding_of_choice` where the logits are the side's own
    (``shown``), and else `TIE_MARGIN` deviations of the noise.
    """

    logits: torch.Tensor
    chosen: torch.Tensor
    noise: float
    behind: torch.Tensor
    shown: bool

    @property
    def follows(self) -> torch.Tensor:
        """Say of each place (bool [flat]) whether its choice follows, up to near ties."""
        return self.behind <= 1


def select(points: LayerPoints) -> Selection:
    """Compare the captured choice of experts with the router logits that it was made from."""
    ids = points.captured("mlp.expert_ids")
    assert ids is not None
    exact = points.compute("mlp.router_logits")
    noise = router_noise(points, exact, points.compute("mlp.router_logits", points.side.low))
    logits = points.get("mlp.router_logits")
    chosen = expert_sets(ids, logits.shape[1])
    worst_in = logits.masked_fill(~chosen, torch.inf).amin(1)
    best_out = logits.masked_fill(chosen, -torch.inf).amax(1)
    ahead = (best_out - worst_in).clamp_min(0.0)
    shown = points.captured("mlp.router_logits") is not None
    allowed = rounding_of_choice(logits, worst_in, best_out) if shown else TIE_MARGIN * noise
    behind = torch.where(ahead > 0, ahead / allowed, ahead)
    valid = points.routed(ids) & (chosen.sum(1) == points.model.config.top_k)
    return Selection(logits, chosen, noise, torch.where(valid, behind, torch.inf), shown)


def judge_selection(points: LayerPoints) -> OwnError:
    """Check that the experts chosen are those with the largest router logits, up to near ties.

    Where the logits are the side's own, one row beyond their rounding convicts.
    """
    made = select(points)
    rows = points.side.fresh
    rows = rows[made.logits[rows].isfinite().all(1)]
    # in excess where a better expert was ahead by more than is allowed
    ratio = (made.behind[rows] * EXCESS_RATIO).clamp_max(_INVALID)
    if made.shown:
        # what is beyond a bound is no matter of how many rows are
        ratio = torch.where(made.behind[rows] > 1, ratio.clamp_min(2 * EXTREME_RATIO), ratio)
    judged = error_of_rows(points, "mlp.expert_ids", rows, ratio)
    if not judged.convicted:
        return judged
    best = largest(made.logits[rows], points.model.config.top_k)
    wrong = (made.chosen[rows].double() - best.double())[:, None]
    # each expert that is one too many or too few is far beyond rounding
    unit = torch.full_like(wrong, 1 / _INVALID)
    return replace(judged, sample=Sample.of(rows, wrong, unit, ratio))


def acquit_weights(points: LayerPoints, errors: list[OwnError]) -> list[OwnError]:
    """Acquit expert weights that are right for the experts that should have been chosen.

    Where only the experts' numbers are wrong, the weights beside them are those of others: that is
    one fault, and not two. ``errors`` are those of the layer.
    """
    by_suffix = {e.point.split(".", 2)[-1]: e for e in errors}
    ids, error = by_suffix.get("mlp.expert_ids"), by_suffix.get("mlp.expert_weights")
    captured = points.captured("mlp.expert_weights")
    if captured is None or not (ids and error and ids.convicted and error.convicted):
        return errors
    rows = error.flat_rows
    exact, low = (
        points.model.route(points.layer, points.get("mlp.router_logits", p)[rows], precision=p)[1]
        for p in (FULL, points.side.low)
    )
    right = measure(
        Output(
            point=error.point,
            layer=error.layer,
            operator=error.operator,
            side=error.side,
            dtype=points.side.dtype,
            captured=captured[rows].sort(1, descending=True).values,
            exact=exact,
            low=low,
            flat_rows=rows,
            covers=error.covers,
        )
    )
    if right.convicted:
        return errors
    why = "the weights are those of the experts that its logits put first: these were not chosen"
    return [replace(e, acquitted=why) if e is error else e for e in errors]


def may_flip(points: LayerPoints) -> torch.Tensor:
    """Say of each place (bool [flat]) whether rounding may choose another expert."""
    exact = points.get("mlp.router_logits")
    chosen = points.model.config.top_k
    if chosen == exact.shape[1]:
        return torch.zeros(len(exact), dtype=torch.bool)
    top = exact.topk(chosen + 1, dim=-1).values
    low = points.get("mlp.router_logits", points.side.low)
    return top[:, -2] - top[:, -1] <= TIE_MARGIN * router_noise(points, exact, low)


def router_noise(points: LayerPoints, exact: torch.Tensor, low: torch.Tensor) -> float:
    """Standard deviation of rounding in the router's logits: one rounding of them at least."""
    return logits_noise(exact, low, points.side.dtype)


def expert_sets(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Mark the experts in ``ids`` int64 [row, slot], numbers that are no expert's left out.

    Returns bool [row, expert].
    """
    known = (ids >= 0) & (ids < experts)
    marks = torch.zeros(len(ids), experts + 1, dtype=torch.bool)
    return marks.scatter_(1, torch.where(known, ids, experts), True)[:, :experts]


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Mark the ``count`` experts with the largest ``logits`` [row, expert]: bool [row, expert]."""
    return expert_sets(logits.topk(count, dim=1).indices, logits.shape[1])
