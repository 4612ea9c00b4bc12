"""The decision map: from the gaps among A, B and C to where to look.

A is generation, B its prefill replay, C the trainer. A and B share weights and differ in path; B
and C share tokens and path and differ in engine. So the column that differs from both others is
where to look, as long as repeats of a column agree with themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from layerbisect.bisect.scores.odd_one import OddOneOut
from layerbisect.bisect.scores.report import Finding, PairReport, RepeatReport
from layerbisect.bisect.shapes.table import IMPOSSIBLE, PLACES, SPREAD

Letter = Literal["A", "B", "C"]

CLEAR = 2.0
"""A gap so many times what repeats differ by is no repeat's doing, and a column whose two gaps are
so many times the third one is the column to look at."""

CHANCE = 1e-6
"""Chance of a false alarm at which a shape convicts."""

_MOST = 0.5
_PART = 1 / 3

SIDES: Mapping[str, str] = {"A": "rollout", "B": "rollout", "C": "trainer"}
PATHS: Mapping[str, str] = {
    "A": "generation (A)",
    "B": "the prefill replay (B)",
    "C": "the trainer's forward (C)",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """Which gaps stand apart, and which column differs from both others.

    ``apart`` are gaps beyond the tolerance and clear of repeats, ``hidden`` those beyond the
    tolerance that repeats may have made. ``letter`` is None where no single column differs;
    ``rest`` is the gap between the two others, and ``chance`` that of one of three exchangeable
    columns differing in as many places.
    """

    apart: tuple[PairReport, ...]
    hidden: tuple[PairReport, ...]
    letter: Letter | None
    rest: PairReport | None
    chance: float = 1.0


def stand(
    pairs: Sequence[PairReport],
    floors: Mapping[str, float],
    tolerance: float,
    odd: OddOneOut | None,
) -> Standing:
    """Place the gaps among A, B and C against the tolerance (nat) and the repeats' floors (nat)."""
    beyond = [pair for pair in pairs if pair.gap.mae > tolerance]
    apart = tuple(p for p in beyond if not p.gap.mae <= CLEAR * floors.get(p.name, 0.0))
    letter: Letter | None = None
    rest: PairReport | None = None
    letters: tuple[Letter, ...] = ("A", "B", "C")
    of = {frozenset((pair.first[0], pair.second[0])): pair for pair in pairs}
    for one in letters:
        others = [pair for both, pair in of.items() if one in both]
        between = [pair for both, pair in of.items() if one not in both]
        if len(others) < 2 or not between or not all(p in apart for p in others):
            continue
        if min(p.gap.mae for p in others) >= CLEAR * between[0].gap.mae:
            letter, rest = one, between[0]
    hidden = tuple(p for p in beyond if p not in apart)
    return Standing(apart, hidden, letter, rest, odd.chance(letter) if odd and letter else 1.0)


def floors(pairs: Iterable[PairReport], repeats: Sequence[RepeatReport]) -> dict[str, float]:
    """Mean difference (nat) that the repeats of a pair's columns show, by pair.

    A cannot be repeated: the same engine's B stands for it.
    """
    of: dict[str, float] = {}
    for report in repeats:
        of[report.letter] = max(of.get(report.letter, 0.0), report.mae)
    known = {"A": of.get("B"), "B": of.get("B"), "C": of.get("C")}
    found: dict[str, float] = {}
    for pair in pairs:
        seen = [known[pair.first[0]], known[pair.second[0]]]
        if any(value is not None for value in seen):
            found[pair.name] = max(value for value in seen if value is not None)
    return found


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape that convicts, and the column that has it, where that can be told."""

    finding: Finding
    letter: Letter | None


def shapes(
    findings: Sequence[Finding],
    letter: Letter | None,
    tolerance: float,
    floors: Mapping[str, float],
) -> tuple[Shape, ...]:
    """Pick what convicts: for each column one shape, of tokens beyond tolerance and repeats.

    A shape has to make the gap that matters, or a third of one that does.

    One that says what was done to the scores comes before one that says where they are apart.

    Args:
        findings: what was found in each of the gaps.
        letter: the column that differs from both others, if one does.
        tolerance: mean difference (nat) that matters, on the tokens that a shape touches.
        floors: what repeats of a pair's columns differ by (nat).
    """
    heavy = []
    for finding in findings:
        matters = max(tolerance, CLEAR * floors.get(finding.pair, 0.0))
        made = finding.mae * finding.explains > matters or finding.explains >= _PART
        # what a sound score cannot be matters whatever else makes the gap
        made = made or finding.test.startswith(IMPOSSIBLE)
        if finding.false_alarm <= CHANCE and finding.mae > matters and made:
            if finding.test not in SPREAD:
                heavy.append(finding)
    chosen: dict[Letter | None, Finding] = {}
    for finding in heavy:
        owner = _owner(finding, heavy, letter)
        best = chosen.get(owner)
        if best is None or _weight(finding) > _weight(best):
            chosen[owner] = finding
    unplaced = chosen.get(None)
    if unplaced is not None and set(_letters(unplaced.pair)) & chosen.keys():
        # most often it is the placed one seen from elsewhere
        del chosen[None]
    return tuple(Shape(finding, owner) for owner, finding in chosen.items())


def _weight(finding: Finding) -> tuple[bool, float, float]:
    cause = finding.test not in PLACES and finding.explains >= _MOST
    return cause, round(finding.explains, 2), -finding.false_alarm


def _owner(finding: Finding, findings: Sequence[Finding], letter: Letter | None) -> Letter | None:
    """The column that a shape is of: itself says so, or two gaps that share one column show it."""
    if finding.side is not None:
        return _as_letter(finding.side)
    showing = [set(_letters(f.pair)) for f in findings if f.test == finding.test]
    common = set.intersection(*showing)
    if len(showing) == 2 and len(common) == 1:
        return common.pop()
    return letter if letter in _letters(finding.pair) else None


def _letters(pair: str) -> tuple[Letter, ...]:
    return tuple(_as_letter(column[0]) for column in pair.split("-"))


def _as_letter(text: str) -> Letter:
    assert text in ("A", "B", "C")
    return text  # type: ignore[return-value]
