"""Whether a side never loaded a tensor: what it has there is no trained weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerbisect.bisect.weight_diff.numbers import correlation, garbage, norm
from layerbisect.bisect.weight_diff.pairs import Pair

INITIAL = 0.05
"""A constant that is nearer than this to the other side is where that one came from."""
# trained weights have a root mean square within these
_PLAUSIBLE = (1e-6, 1e3)


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """What a side holds in place of a weight; ``side`` is 0 or 1, or None where that is open."""

    side: int | None
    how: str
    evidence: str


def never_loaded(pair: Pair, labels: tuple[str, str]) -> NotLoaded | None:
    """Say what is no trained weight on one side or both; None where both may be."""
    said = [garbage(pair.first), garbage(pair.second)]
    bad = [i for i, what in enumerate(said) if what is not None]
    if pair.apart < INITIAL or (len(bad) == 1 and pair.stale == bad[0]):
        # norms that have moved a little from their initial ones
        return None
    if len(bad) == 1:
        what = str(said[bad[0]])
        line = f"{pair.name} is {what} on {labels[bad[0]]}, and not on the other side"
        return NotLoaded(bad[0], what, line)
    if len(bad) == 2:
        line = f"{said[0]} and {said[1]}"
        return NotLoaded(pair.off(), line, line)
    sizes = [norm(x) / math.sqrt(x.numel()) for x in (pair.first, pair.second)]
    ratio = max(sizes) / max(min(sizes), 1e-45)
    if ratio > 100 and abs(correlation(pair.first, pair.second)) < 0.5:
        odd = [i for i, s in enumerate(sizes) if not _PLAUSIBLE[0] < s < _PLAUSIBLE[1]]
        line = f"its root mean square is {sizes[0]:.3g} and {sizes[1]:.3g}"
        side = odd[0] if len(odd) == 1 else pair.off()
        return NotLoaded(side, "of a wildly different scale", line)
    return None
