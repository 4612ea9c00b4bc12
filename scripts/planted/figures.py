"""Count the benchmark's results: shares that are right, misses, confusions and detection curves."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scripts.planted.fault import Truth
from scripts.planted.judged import accuses, right, told
from scripts.planted.rules import first_beyond

STRONG = 2.0
"""A fault whose effect on the scores is at least so many times the floor is a strong one."""
FIXED = {"relative error": 1e-2, "cosine": 1e-4}
"""Thresholds that people choose who do not tune them."""


@dataclass(frozen=True)
class Result:
    """One judged case, as `scripts.accuracy` keeps it."""

    row: dict[str, Any]

    @property
    def id(self) -> str:
        """Its name with model, dtype and kind."""
        return str(self.row["id"])

    @property
    def kind(self) -> str:
        """``single``, ``score``, ``double``, ``control``, ``size`` or ``engine``."""
        return str(self.row["kind"])

    @property
    def answer(self) -> dict[str, Any]:
        """What the locator said."""
        found: dict[str, Any] = self.row["answer"]
        return found

    @cached_property
    def truths(self) -> tuple[Truth, ...]:
        """What was planted; none in a control."""
        return tuple(Truth(**truth) for truth in self.row["truths"])

    @cached_property
    def right(self) -> dict[str, bool]:
        """As `scripts.planted.judged.right`."""
        return right(self.truths, self.answer)

    @property
    def accused(self) -> bool:
        """Whether anybody is blamed."""
        return accuses(self.answer)

    @property
    def told(self) -> str:
        """The answer in few words."""
        return told(self.answer)

    @property
    def effect(self) -> float:
        """What it changes in the scores, in floors."""
        floor = self.row["floor"]
        return float(self.row["effect"]) / floor if floor else math.inf

    @property
    def class_(self) -> str:
        """``strong``, ``weak`` (between one and two floors), ``hidden`` or ``invisible``.

        A hidden fault is below the floor in the scores and above one rounding in its operator's
        output; an invisible one is below that, too. ``nothing`` is none at all: a fault that this
        model, or so few tokens, do not show in a single bit.
        """
        if self.effect == 0 and self.row["output"] == 0:
            return "nothing"
        if self.effect >= STRONG:
            return "strong"
        if self.effect >= 1:
            return "weak"
        # a choice of experts has no size: a fault that changes it is in the output
        return "invisible" if self.row["output"] <= 1 else "hidden"


def single_faults(results: Iterable[Result]) -> list[Result]:
    """Single faults, those between log-probs and record, and those on SGLang and Megatron."""
    kinds = ("single", "score", "engine")
    return [r for r in results if r.kind in kinds and len(r.truths) == 1 and r.class_ != "nothing"]


def fault_pairs(results: Iterable[Result]) -> list[Result]:
    """Cases with two faults at once."""
    return [r for r in results if len(r.truths) == 2]


def clean_controls(results: Iterable[Result]) -> list[Result]:
    """Cases with harmless differences alone, or none."""
    return [r for r in results if not r.truths]


def share(results: Sequence[Result], what: Callable[[Result], bool]) -> str:
    """``95.0 % (19 of 20)``, or a dash where there is none."""
    if not results:
        return "-"
    count = sum(map(what, results))
    return f"{100 * count / len(results):.1f} % ({count} of {len(results)})"


def confusion(results: Iterable[Result]) -> dict[str, Counter[str]]:
    """What was said of each component: the operators named, ``nothing``, or with something else."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        (truth,) = result.truths
        said = {c["operator"] or "a stretch" for c in result.answer["culprits"]}
        name = " and ".join(sorted(said)) if said else "nothing"
        found[truth.operator][name] += 1
    return found


def rule_layer(result: Result, rule: str, threshold: float) -> int | None:
    """The layer that a simple rule blames; -1 is the embedding."""
    return first_beyond(result.answer["rules"][rule], threshold)


def strictest(controls: Sequence[Result], rule: str) -> float:
    """The lowest threshold at which a rule accuses no control; infinite where there is none."""
    largest = 0.0 if controls else math.inf
    for result in controls:
        values = [v for v in result.answer["rules"][rule] if math.isfinite(v)]
        largest = max([largest, *values])
    return largest


def rule_right(result: Result, rule: str, threshold: float) -> bool:
    """Whether a rule names the planted layer; it has no name for what comes after the last one."""
    named = rule_layer(result, rule, threshold)
    (truth,) = result.truths
    if truth.layer is not None:
        return named == truth.layer
    if truth.operator == "embedding":
        return named == -1
    # a fault of every layer shows from the first one on
    return truth.operator not in ("head", "logprob", "inputs") and named == 0


def smallest_found(results: Iterable[Result], found: Callable[[Result], bool]) -> float | None:
    """The smallest size down to which every size is found."""
    smallest = None
    for result in sorted(results, key=lambda r: -r.row["size"]):
        if not found(result):
            break
        smallest = float(result.row["size"])
    return smallest


def cost(results: Sequence[Result]) -> tuple[float, float]:
    """Median of forwards of the tail, and of seconds, that a verdict took."""
    return (
        statistics.median(r.answer.get("forwards", 0) for r in results),
        statistics.median(r.answer["seconds"] for r in results),
    )


def missed_why(result: Result) -> str:
    """What went wrong in one case, in few words, from the answer alone."""
    said, planted = result.answer["culprits"], result.truths
    if result.answer["status"] == "refused":
        return f"refused: {result.answer['reasons'][0]}"
    if not said:
        reason = (result.answer["reasons"] or [""])[0]
        return f"{result.answer['status']}: {reason}"
    truths = {(t.layer, t.operator, t.side) for t in planted}
    named = {(c["layer"], c["operator"], c["side"]) for c in said}
    lost, more = truths - named, named - truths
    parts = []
    if lost:
        parts.append("not named: " + ", ".join(sorted(_place(one) for one in lost)))
    if more:
        parts.append("named beside: " + ", ".join(sorted(_place(one) for one in more)))
    return "; ".join(parts)


def _place(one: tuple[int | None, str | None, str]) -> str:
    layer, operator, side = one
    where = "" if layer is None else f" of layer {layer}"
    return f"{operator or 'a stretch'}{where} ({side})"
