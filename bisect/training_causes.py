"""Explain where two forwards of one module part: what is active there, or what it looks like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerbisect.bisect.training_points import between
from layerbisect.bisect.training_report import Apart, Cause, CauseKind, RouteOrigin
from layerbisect.captures.forward_mode import Dropout, ForwardMode
from layerbisect.captures.points import parse
from layerbisect.wording import count

GROWTH = 8.0
"""A difference so many times as large as any before it did not come with the input."""
_ROUTED = ("mlp.router_logits", "mlp.expert_ids", "mlp.expert_weights")
_NOISE = ("moe_input_jitter_eps", "moe_router_force_load_balancing")


@dataclass(frozen=True, slots=True)
class Doing:
    """What a forward does that another does not: its mode, and which routers are at fault.

    ``noisy`` are layers whose router makes more of an equal input than rounding does, ``choosing``
    those that choose otherwise by equal logits.
    """

    mode: ForwardMode
    noisy: tuple[int, ...] = ()
    choosing: tuple[int, ...] = ()


def explain(
    points: Sequence[Apart], order: Sequence[str], doing: Doing, *, again: bool = False
) -> tuple[Cause, ...]:
    """Explain the first point that differs, and those at which much more appears.

    ``points`` are all that were compared, in ``order``. With ``again`` the second of the two is
    what a backward computed again, where layers begin anew with the values that were kept.
    """
    causes: list[Cause] = []
    before: str | None = None
    parted, largest = False, 0.0
    for point in points:
        if point.differing:
            # where all rows have seen other experts, their routes are enough of an explanation
            clear = point.size is not None and point.rerouted < point.rows
            grown = clear and point.beyond and (point.size or 0.0) > GROWTH * largest
            if not parted or (grown and not again):
                causes.append(_cause(point, before, order, doing, again))
            parted, largest = True, max(largest, point.size or 0.0)
        elif again and parse(point.point).suffix == "input":
            parted = False
        before = point.point
    return tuple(causes)


def active_words(drops: Sequence[Dropout]) -> str:
    """Name modules that drop, and with which probability."""
    shown = ", ".join(f"{drop.module} (p = {drop.p:g})" for drop in drops[:2])
    return shown + (f" and {count(len(drops) - 2, 'more module')}" if drops[2:] else "")


def route_reasons(origins: Sequence[RouteOrigin], doing: Doing) -> tuple[str, ...]:
    """Say in sentences what routers do of their own, and that the others inherit."""
    found = []
    for origin in origins:
        layer = f"layers.{origin.layer}"
        if origin.layer in doing.noisy and origin.logits_size is not None:
            found.append(
                f"the router of {layer} makes other logits of an equal input (by "
                f"{origin.logits_size:.2g} of their size): {_noise_words(doing.mode)}"
            )
        if origin.choice:
            found.append(
                f"the router of {layer} chooses other experts by equal logits for "
                f"{count(origin.choice, 'token')}: a bias that balances it was updated, or the "
                "choice is another one in training"
            )
    return tuple(found)


def _cause(
    point: Apart, after: str | None, order: Sequence[str], doing: Doing, again: bool
) -> Cause:
    place = between(order, after, point.point)
    drops = [drop for drop in doing.mode.dropout if drop.point in place]
    if not drops and point.beyond:
        drops = [drop for drop in doing.mode.dropout if not drop.point]
    if drops:
        modules = tuple(drop.module for drop in drops)
        words = f"dropout is active in {active_words(drops)}"
        if again:
            words = f"{words}, and was drawn anew: the random state was not restored"
        return _made("dropout", point, after, modules, words)
    routers = {parse(name).layer for name in place if parse(name).suffix in _ROUTED}
    noise = [name for name in _NOISE if name in doing.mode.noise]
    noisy, choosing = routers.intersection(doing.noisy), routers.intersection(doing.choosing)
    if routers and (noise or noisy or choosing or point.size is None):
        layer = min(noisy or choosing or routers, key=lambda number: number or 0)
        if noise or noisy:
            words = _noise_words(doing.mode)
        elif choosing:
            words = "its experts are chosen otherwise by equal logits"
        else:
            words = "its experts are others, and the logits that would tell why are not captured"
        return _made("routing", point, after, (), f"the router of layers.{layer}: {words}")
    if not point.beyond:
        words = (
            "of rounding's size: the kernel that computes it again is not deterministic"
            if again
            else "of rounding's size: another kernel, or another order of sums, with gradients"
        )
        return _made("rounding", point, after, (), words)
    within = f"{count(len(place), 'operator')} lie between" if len(place) > 1 else "its operator"
    words = f"more than rounding, and nothing is known to be drawn at random there ({within})"
    return _made("numerics", point, after, (), words)


def _noise_words(mode: ForwardMode) -> str:
    told = [f"{name} is {mode.noise[name]}" for name in _NOISE if name in mode.noise]
    return " and ".join(told) or "noise or jitter on what it reads, or another kernel"


def _made(
    kind: CauseKind, point: Apart, after: str | None, modules: tuple[str, ...], sentence: str
) -> Cause:
    return Cause(kind, point.point, after, point.size, modules, sentence)
