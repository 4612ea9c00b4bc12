"""Compare a frozen forward with the training forward of the same module, before the optimizer.

The frozen forward scores C; what a loss differentiates is another forward, with gradients, in
training mode, perhaps computed twice. Where C agrees with the rollout and training behaves
otherwise, the two are compared by point: dropout, recomputation, routing, or another kernel.
"""

from __future__ import annotations

from os import PathLike

import numpy as np

from layerbisect.bisect.join import Joined, join
from layerbisect.bisect.metrics import score_gap
from layerbisect.bisect.training_causes import Doing, explain, route_reasons
from layerbisect.bisect.training_gate import BALANCING, changed, unjudged
from layerbisect.bisect.training_points import Pair, allowed_size, between, compared, roundings
from layerbisect.bisect.training_recompute import recomputed
from layerbisect.bisect.training_report import (
    Apart,
    Cause,
    Recomputed,
    RouteOrigin,
    TrainingVerdict,
)
from layerbisect.bisect.training_routing import doing_of, route_origins
from layerbisect.bisect.verdict import Coverage, CoveredRows, Points, Status
from layerbisect.captures.points import parse
from layerbisect.captures.store import Capture
from layerbisect.wording import count

_AGAIN = "capture again as the reasons say, then `layerbisect training FROZEN TRAINING`"


def compare_training(
    frozen: str | PathLike[str] | Capture,
    training: str | PathLike[str] | Capture,
    *,
    recompute: bool = False,
) -> TrainingVerdict:
    """Compare two captures of one module and say what its training forward does otherwise.

    Args:
        frozen: the forward that scored C, in eval mode and without gradients.
        training: the forward that a loss is made of, with its backward inside the capture where
            activations are recomputed.
        recompute: what was recomputed must have been seen; without it that cannot be judged.

    Raises:
        TokenMismatchError: after a common prefix the captures hold different tokens.
        LayerBisectError: they have no row in common, or are no captures.
    """
    sides = (_opened(frozen), _opened(training))
    joined = join(*sides)
    pair = Pair(*sides, joined.rollout, joined.trainer, joined.chains)
    mode = next(iter(sides[1].modes), None)
    origins = route_origins(pair)
    doing = doing_of(pair, origins, mode)
    points = (*compared(pair), *_scores(pair, joined))
    causes = explain(points, pair.order, doing)
    again = recomputed(sides[1], mode)
    doubts = unjudged(sides, joined, points, again, recompute)
    own = _own_reasons(sides, origins, doing)
    diverges = bool(own) or again.wrong or any(cause.kind != "rounding" for cause in causes)
    status: Status = "inconclusive" if doubts else "divergent" if diverges else "agree"
    differing = tuple(point for point in points if point.differing)
    scored = len(joined.score_rollout) > 0
    return TrainingVerdict(
        status=status,
        gap=score_gap(joined.score_trainer, joined.score_rollout) if scored else None,
        first=differing[0] if differing else None,
        causes=causes,
        routing=origins,
        recomputed=again,
        mode=mode,
        points=differing,
        coverage=_coverage(pair, joined, points, again),
        reasons=(*doubts, *own),
        next=_AGAIN if doubts else _next(points, causes, again, pair.order),
        labels=(sides[0].label, sides[1].label),
    )


def _opened(capture: str | PathLike[str] | Capture) -> Capture:
    return capture if isinstance(capture, Capture) else Capture.open(capture)


def _scores(pair: Pair, joined: Joined) -> tuple[Apart, ...]:
    """Compare log-probs as one more point; relative to their own size over all tokens."""
    first, second = joined.score_rollout, joined.score_trainer
    if not len(first):
        return ()
    differing = int((first != second).sum())
    away = np.abs(first - second)
    size = float(np.quantile(away, 0.99) / max(float(np.sqrt((first**2).mean())), 1e-6))
    at = [name for name in pair.order if pair.held(name).any()]
    # the softmax, and what was not captured before it
    steps = roundings(between(pair.order, at[-1] if at else None, "logprob"))
    allowed = allowed_size(pair.first, at[-1], 1, max(steps, 2)) if at else 0.0
    bad = int((~np.isfinite(away)).sum())
    return (Apart("logprob", len(first), differing, size, allowed, bad),)


def _own_reasons(
    sides: tuple[Capture, Capture], origins: tuple[RouteOrigin, ...], doing: Doing
) -> tuple[str, ...]:
    found = route_reasons(origins, doing)
    biases = [name for name in changed(sides) if name.endswith(BALANCING)]
    if biases:
        found = (
            *found,
            f"{count(len(biases), 'bias')} that balance routers were updated between the two "
            f"forwards, {biases[0]} first",
        )
    return found


def _coverage(pair: Pair, joined: Joined, points: tuple[Apart, ...], again: Recomputed) -> Coverage:
    seen = {point.point for point in points}
    wanted = dict.fromkeys((*pair.first.info.points, *pair.second.info.points))
    notes = [*pair.first.problems, *pair.second.problems]
    modes = pair.second.modes
    if modes and not any(mode.training for mode in modes):
        notes.append("the training forward ran in eval mode, so no dropout could show")
    if again.setting and not again.seen:
        notes.append(f"{again.setting}: nothing that was computed again was seen, nor judged")
    return Coverage(
        Points(len(points), tuple(name for name in wanted if name not in seen)),
        CoveredRows(len(joined), joined.left_out),
        tuple(notes),
    )


def _next(
    points: tuple[Apart, ...], causes: tuple[Cause, ...], again: Recomputed, order: tuple[str, ...]
) -> str:
    """Say what to look at next; ``causes`` first those that are more than rounding."""
    told = [*causes, *again.causes]
    first = next((cause for cause in told if cause.kind != "rounding"), None)
    if first is None:
        if again.seen and not again.inner:
            return "to see inside of what is recomputed, capture both forwards with points all"
        if any(point.differing for point in points):
            return "nothing to do: rounding alone tells the two forwards apart"
        return "nothing to do: what a loss differentiates is the frozen forward"
    if first.kind == "dropout" and first not in causes:
        return "keep the random state for recomputation (preserve_rng_state), and compare again"
    if first.kind == "dropout":
        return f"set the dropout of {first.modules[0]} to 0, and compare again"
    place = between(order, first.after, first.point)
    layers = sorted({layer for name in place if (layer := parse(name).layer) is not None})
    if len(place) > 1 and layers:
        wanted = ",".join(f"layers.{layer}" for layer in layers)
        return f"capture both forwards again with points {wanted},logprob, and compare"
    what = "the router" if first.kind == "routing" else "what computes it"
    return f"look at {what} at {first.point} in the training forward"
