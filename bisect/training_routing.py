"""Why a training forward sends tokens to other experts than the frozen one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.training_causes import Doing
from layerbisect.bisect.training_points import Pair, allowed_size, relative_size, same_bits
from layerbisect.bisect.training_report import RouteOrigin
from layerbisect.captures.forward_mode import ForwardMode


def route_origins(pair: Pair) -> tuple[RouteOrigin, ...]:
    """Tell, for each layer that routes, what is the router's own and what it inherited."""
    layers = pair.first.info.moe_layers
    return tuple(found for layer in layers if (found := _origin(pair, layer)) is not None)


def doing_of(pair: Pair, origins: tuple[RouteOrigin, ...], mode: ForwardMode | None) -> Doing:
    """Say what the second forward does that the first does not."""
    return Doing(
        mode=mode or ForwardMode(training=False, gradients=False),
        noisy=tuple(o.layer for o in origins if _noisy(o, pair)),
        choosing=tuple(o.layer for o in origins if o.choice),
    )


def _noisy(origin: RouteOrigin, pair: Pair) -> bool:
    """Whether a router makes more of an equal input than rounding does."""
    if origin.logits_size is None:
        return False
    point = f"layers.{origin.layer}.mlp.router_logits"
    return origin.logits_size > allowed_size(pair.first, point, 1, 1)


def _origin(pair: Pair, layer: int) -> RouteOrigin | None:
    ids, read, logits = (
        f"layers.{layer}.mlp.{name}" for name in ("expert_ids", "norm", "router_logits")
    )
    rows = pair.held(ids)
    if not rows.any():
        return None
    flipped = ~same_bits(*pair.read(ids, rows))
    given, made = _same(pair, read, rows), _same(pair, logits, rows)
    inherited = flipped & (_false(rows) if given is None else ~given)
    own = flipped & ~inherited
    by_choice = own & (_false(rows) if made is None else made)
    # with logits that differ it is the router's doing only where it is known what it read
    told = given is not None and made is not None
    by_logits = own & ~by_choice if told else _false(rows)
    return RouteOrigin(
        layer=layer,
        rows=int(rows.sum()),
        flips=int(flipped.sum()),
        inherited=int(inherited.sum()),
        logits=int(by_logits.sum()),
        choice=int(by_choice.sum()),
        unknown=int((own & ~by_choice & ~by_logits).sum()),
        logits_size=_own_size(pair, logits, rows, given, made),
    )


def _own_size(
    pair: Pair,
    logits: str,
    rows: NDArray[np.bool_],
    given: NDArray[np.bool_] | None,
    made: NDArray[np.bool_] | None,
) -> float | None:
    if given is None or made is None or not (own := given & ~made).any():
        return None
    chosen = rows.copy()
    chosen[rows] = own
    return relative_size(logits, *pair.read(logits, chosen))[0]


def _same(pair: Pair, point: str, rows: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    """Whether both have the same bits at a point, bool [row of ``rows``]; None where not seen."""
    if point not in pair.first.points or not pair.held(point)[rows].all():
        return None
    return same_bits(*pair.read(point, rows))


def _false(rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.zeros(int(rows.sum()), bool)
