"""How often verdicts were right, counted by groups of cases."""

from __future__ import annotations

import math
from dataclasses import dataclass

SURE = 1.959964
"""Standard deviations of a normal variable that hold 95 % of it."""


@dataclass(frozen=True, slots=True)
class Group:
    """Cases of one kind: ``right`` of ``total``, with the 95 % interval of the share (Wilson).

    ``of`` names what the groups beside this one divide the cases by, such as ``dtype``; a case
    counts once in each of these divisions.
    """

    name: str
    right: int
    total: int
    low: float
    high: float
    of: str = ""


@dataclass(frozen=True, slots=True)
class Miss:
    """A case whose verdict was not right: what was planted where, and what the verdict named."""

    case: str
    planted: str
    named: str


@dataclass(frozen=True, slots=True)
class AccuracySummary:
    """All groups, every miss, and what was measured in a sentence."""

    measured: str
    groups: tuple[Group, ...]
    misses: tuple[Miss, ...]


def group(name: str, right: int, total: int, of: str = "") -> Group:
    """Make a group with its interval: Wilson's, which is right for shares near 0 and 1 too.

    Raises ValueError where there are no cases, or more right ones than cases.
    """
    if not 0 <= right <= total or not total:
        raise ValueError(f"a group needs cases, and no more right than there are: {right}, {total}")
    share, square = right / total, SURE**2 / total
    middle = (share + square / 2) / (1 + square)
    half = math.sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
    # the ends are known where all are right, or none
    low = 0.0 if right == 0 else middle - half
    high = 1.0 if right == total else middle + half
    return Group(name, right, total, low, high, of)
