"""One thing that was looked at, and how it is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "missing", "problem"]
"""``problem`` hides points, or keeps a verdict from being right; ``note`` changes numbers, or is
worth knowing; ``missing`` is not here, which may be fine."""

ORDER: tuple[State, ...] = ("problem", "note", "missing", "ok")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at.

    Args:
        name: what it is.
        state: see `State`.
        found: what was found.
        advice: what to do about it, where that is something.
        effect: what it does to a capture, or to the numbers in it.
        tried: whether the effect was seen in a run; else it is read in the source or the
            documentation of whoever reads the setting, and was not tried on a GPU.
    """

    name: str
    state: State
    found: str
    advice: str = ""
    effect: str = ""
    tried: bool = True


def worst_first(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Sort by state, and keep the order within each."""
    return tuple(sorted(checks, key=lambda one: ORDER.index(one.state)))
