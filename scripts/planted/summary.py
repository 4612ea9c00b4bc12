"""The benchmark's results as data that `layerbisect report` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from layerbisect.accuracy_summary import AccuracySummary, Group, Miss, group
from scripts.planted.figures import (
    STRONG,
    Result,
    clean_controls,
    fault_pairs,
    single_faults,
)

_SEEN = ("strong", "weak", "hidden")
"""Faults that a verdict can be expected to see; the others are below a rounding everywhere."""


def summarize(rows: Iterable[dict[str, Any]]) -> AccuracySummary:
    """Count how many verdicts are right, by kind of case, model, dtype and operator.

    Right is layer, operator and side of all that was planted, and nothing else named; of a control,
    nobody accused. Faults count whose effect on the scores is at least `STRONG` floors; every miss
    that a verdict could have seen is listed.
    """
    results = [Result(row) for row in rows]
    singles, pairs = single_faults(results), fault_pairs(results)
    clean = clean_controls(results)
    strong = [r for r in singles if r.class_ == "strong"]
    groups = [
        *_apart("one fault", strong),
        *_apart("two faults at once", [r for r in pairs if r.class_ == "strong"]),
        *_apart(
            "one fault, below the floor in scores", [r for r in singles if r.class_ == "hidden"]
        ),
        *_counted([("controls with nothing wrong", clean)], "kind of case"),
        *_by(strong, lambda r: f"{r.row['model']}, {r.row['dtype']}", "model and dtype, one fault"),
        *_by(clean, lambda r: f"{r.row['model']}, {r.row['dtype']}", "model and dtype, controls"),
        *_by(strong, lambda r: r.truths[0].operator, "operator that was planted, one fault"),
    ]
    missed = [r for r in (*singles, *pairs) if r.class_ in _SEEN and not _right(r)]
    missed += [r for r in clean if not _right(r)]
    measured = (
        f"{len(results):,} cases with planted faults or none were judged; of {len(strong):,} "
        f"single faults that move the scores by {STRONG:g} times what clean engines differ by, or "
        "more, "
        f"{sum(map(_right, strong)):,} were named rightly: layer, operator and side, and nothing "
        f"else; of {len(clean):,} clean controls {sum(not _right(r) for r in clean):,} were accused"
    )
    return AccuracySummary(measured, tuple(groups), tuple(map(_miss, missed)))


def _right(result: Result) -> bool:
    return result.right["all"] if result.truths else not result.accused


def _apart(name: str, results: Sequence[Result]) -> list[Group]:
    """Count faults that the method was tuned on, and those that were kept aside."""
    parts = [
        (f"{name}, {part}", [r for r in results if bool(r.row["held_out"]) == aside])
        for part, aside in (("tuned on", False), ("kept aside", True))
    ]
    return _counted(parts, "kind of case")


def _by(results: Sequence[Result], key: Callable[[Result], str], of: str) -> list[Group]:
    names = sorted(set(map(key, results)))
    return _counted([(name, [r for r in results if key(r) == name]) for name in names], of)


def _counted(parts: Iterable[tuple[str, Sequence[Result]]], of: str) -> list[Group]:
    return [group(name, sum(map(_right, found)), len(found), of) for name, found in parts if found]


def _miss(result: Result) -> Miss:
    planted = ", and ".join(
        f"{one.operator}{'' if one.layer is None else f' of layer {one.layer}'} ({one.side})"
        for one in result.truths
    )
    return Miss(result.id, planted or "nothing", result.told)
