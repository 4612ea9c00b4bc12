"""Whether a record's scores are those that the engines computed, as their captures show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.budget import GAP_FACTOR
from layerbisect.captures.record.call import GRADIENT, is_score
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.store import Capture

KEPT = 1e-3
"""Mean difference (nat) up to which a kept score is the captured one, whatever rounding predicts:
records and captures of one forward differ by how they were printed and read."""
FEWEST = 16
"""Fewer tokens that both hold tell nothing."""

CLEAR = 2.0
"""Times what is allowed: less on one side, or more on the other, leaves no doubt."""

Computed = Sequence[Mapping[str, NDArray[np.float64]]]
"""Captured log-probs (nat) of each call's response tokens, of the rollout and of the trainer."""


@dataclass(frozen=True, slots=True)
class Kept:
    """How a column of the record differs from the log-probs captured of the same tokens.

    ``mae`` is in nats over ``tokens``; ``allowed`` is what rounding explains. ``scaled`` says that
    the record calls the scores those of logits over a temperature; a capture has raw ones.
    """

    column: str
    side: str
    tokens: int
    mae: float
    allowed: float
    scaled: bool = False

    @property
    def computed(self) -> bool:
        """Whether the kept score is the one that the engine computed."""
        return self.mae <= self.allowed

    @property
    def raw(self) -> bool:
        """Whether it is so beyond doubt."""
        return self.mae <= self.allowed / CLEAR

    @property
    def far(self) -> bool:
        """Whether it is beyond doubt another score than the one that was captured."""
        return self.mae > self.allowed * CLEAR


def hold_against_captures(
    record: ScoreRecord, computed: Computed, sides: Sequence[Capture], predicted: float | None
) -> Iterator[Kept]:
    """Hold the record's columns against the captured log-probs of the same tokens.

    ``predicted`` is the gap (nat) that rounding makes, None where it is not known.
    """
    if predicted is None:
        # how far decode may be from a captured prefill is not known then
        return
    allowed = max(KEPT, GAP_FACTOR * predicted)
    for side, here, letters in zip(sides, computed, ("AB", "C"), strict=True):
        for column, scoring in record.info.columns.items():
            if column[0] not in letters or not is_score(column) or column == GRADIENT:
                continue
            if scoring.definition == "behavior":
                # after filters and penalties, which no capture shows
                continue
            off = np.concatenate(
                [np.abs(call.scores[column] - here[call.name])[call.mask] for call in record]
            )
            off = off[np.isfinite(off)]
            if len(off) >= FEWEST:
                scaled = scoring.definition == "temperature"
                yield Kept(column, side.label, len(off), float(off.mean()), allowed, scaled)


def kept_otherwise(kept: Sequence[Kept]) -> Kept | None:
    """The worst column of the one side none of whose columns is what the record calls it.

    None where it is not far off, or where the other side is not known to be right: then the
    captures may be of another run, and nobody kept a wrong score. Scores over a temperature cannot
    be computed from a capture, but they are not the raw ones, unless the other side's are raw, too:
    a temperature of 1.
    """
    sides = {k.side for k in kept}
    for side in sides:
        mine = [k for k in kept if k.side == side]
        others = [k for k in kept if k.side != side]
        if not others:
            continue
        if all(k.far and not k.scaled for k in mine) and any(k.raw for k in others):
            return max(mine, key=lambda k: k.mae)
        if all(k.raw and k.scaled for k in mine) and all(k.far and k.scaled for k in others):
            return mine[0]
    return None
