"""How often verdicts were right, counted by groups of cases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """Cases of one kind: ``right`` of ``total``, with the 95 % interval of the share (Wilson)."""

    name: str
    right: int
    total: int
    low: float
    high: float


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
