"""Which operators a deterministic mode changes, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from layerbisect.kernels.replay.report import Replay, Result


@dataclass(frozen=True, slots=True)
class Pair:
    """An operator with a switch off and on: a fast implementation, and its deterministic twin.

    ``family`` is the switch. Either is None where its package offers only the other. Where
    one of them didn't run its Result says why. A stretch of several operators that one of the two
    does not have is filled with the low-precision reference, as its Result says.
    """

    point: str
    layer: int | None
    operator: str
    covers: tuple[str, ...]
    family: str
    off: Result | None
    on: Result | None

    @property
    def error_ratio(self) -> tuple[float | None, float | None]:
        """Error (95th percentile, multiples of the low-precision reference's), off and on."""
        off, on = (
            None if one is None or one.errors is None else one.errors.ratio
            for one in (self.off, self.on)
        )
        return off, on

    @property
    def time_ratio(self) -> float | None:
        """How many times longer it takes when on; None where nothing was timed."""
        off, on = (None if one is None else one.time_ms for one in (self.off, self.on))
        return on / off if on is not None and off else None

    def to_json(self) -> dict[str, Any]:
        """Return the pair as an object of plain values."""
        off, on = self.error_ratio
        return {
            **dataclasses.asdict(self),
            "error_ratio": {"off": off, "on": on},
            "time_ratio": self.time_ratio,
        }


def deterministic_table(replays: Iterable[Replay]) -> tuple[Pair, ...]:
    """Pair what each stretch's implementations have of both settings, in the order of the replays.

    One pair for every deterministic implementation that ran, beside the fast one of its family that
    has most operators in common with it; one pair for a family where neither or only one ran.
    """
    return tuple(pair for replay in replays for pair in _pairs(replay))


def _pairs(replay: Replay) -> Iterable[Pair]:
    switched = [one for one in replay.results if one.family]
    for family in dict.fromkeys(one.family for one in switched):
        fast, fixed = (
            _best([one for one in switched if (one.family, one.mode) == (family, mode)])
            for mode in ("fast", "deterministic")
        )
        settings: list[Result | None] = [*fixed] or [None]
        for on in settings:
            yield Pair(
                point=replay.point,
                layer=replay.layer,
                operator=replay.operator,
                covers=replay.covers,
                family=family,
                off=_like(on, fast),
                on=on,
            )


def _best(found: Sequence[Result]) -> list[Result]:
    """Take those that ran, or the first one where none did."""
    return [one for one in found if one.state == "ran"] or list(found[:1])


def _like(on: Result | None, fast: Sequence[Result]) -> Result | None:
    filled = set(on.filled) if on is not None else set()
    return min(fast, key=lambda one: len(filled ^ set(one.filled)), default=None)
