"""Write docs/accuracy.md from the benchmark's results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scripts.planted import figures
from scripts.planted.catalogue import CONTROLS, EVERYTHING, NOT_PLANTED
from scripts.planted.figures import (
    STRONG,
    Result,
    clean_controls,
    fault_pairs,
    share,
    single_faults,
)
from scripts.planted.page_rules import accused, rules_part, sizes_part, table
from scripts.planted.page_words import EXPLAINED, HOW, INTRO, explanation

CLASSES = ("strong", "weak", "hidden", "invisible")


def write_page(rows: Iterable[dict[str, Any]], again: Iterable[dict[str, Any]] = ()) -> str:
    """The whole page, in Markdown.

    ``again`` are the faults kept aside, judged once more after what they had shown was mended.
    """
    results = [Result(row) for row in rows]
    parts = [
        INTRO,
        _judged(results),
        "## What was reached",
        _reached(results),
        _reached_again(results, [Result(row) for row in again]),
        "## Each kind of fault",
        _kinds(results),
        "## Where it ran",
        _scenes(results),
        "## What was said of each component",
        _confusion(results),
        "## The smallest fault found",
        sizes_part(results),
        "## Simpler rules on the same captures",
        rules_part(results),
        "## What a verdict costs",
        _cost(results),
        "## Every miss",
        _misses(results),
        "## Faults too small to see",
        _small(results),
        "## Clean controls",
        _controls(results),
        "## The reports",
        _reports(results),
        HOW,
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _judged(results: Sequence[Result]) -> str:
    counts = Counter((r.row["model"], r.row["dtype"]) for r in results)
    told = ", ".join(f"{count} on {model} in {dtype}" for (model, dtype), count in counts.items())
    return f"This page is of {len(results)} cases: {told}."


def _apart(results: Sequence[Result], what: Callable[[Result], bool]) -> tuple[str, str]:
    """A share of the faults tuned on, and of those kept aside."""
    return (
        share([r for r in results if not r.row["held_out"]], what),
        share([r for r in results if r.row["held_out"]], what),
    )


def _reached(results: Sequence[Result]) -> str:
    singles, pairs = single_faults(results), fault_pairs(results)
    strong = [r for r in singles if r.class_ == "strong"]
    hidden = [r for r in singles if r.class_ == "hidden"]
    blamed = sum(r.accused for r in clean_controls(results))
    both = [r for r in pairs if r.class_ == "strong"]
    rows = [
        (f"single faults of {STRONG:g} floors or more: layer", "", *_apart(strong, _is("layer"))),
        ("- operator", "", *_apart(strong, _is("operator"))),
        ("- side", "", *_apart(strong, _is("side"))),
        ("- all three, and nothing else named", "95 %", *_apart(strong, _is("all"))),
        ("- of those with a place: the place", "", *_apart(_placed(strong), _is("where"))),
        ("two faults at once, both named and nothing else", "90 %", *_apart(both, _is("all"))),
        (
            "below the floor in scores, above it in their output",
            "80 %",
            *_apart(hidden, _is("all")),
        ),
    ]
    count = len(clean_controls(results))
    return (
        table(("", "wanted", "faults tuned on", "faults kept aside"), rows)
        + "\n\nOf strong single faults, right in all their places: "
        + ", ".join(
            f"{whole} of {all_} {what}"
            for what, (whole, all_) in (
                ("that were tuned on", _whole(r for r in strong if not r.row["held_out"])),
                ("that were kept aside", _whole(r for r in strong if r.row["held_out"])),
            )
        )
        + f".\n\nClean controls accused: {blamed} of {count}."
    )


def _whole(results: Iterable[Result]) -> tuple[int, int]:
    """How many faults are right wherever they were planted, and how many there are."""
    right: dict[str, bool] = {}
    for result in results:
        name = str(result.row["names"][0])
        right[name] = right.get(name, True) and result.right["all"]
    return sum(right.values()), len(right)


def _reached_again(results: Sequence[Result], again: Sequence[Result]) -> str:
    """The figures of the faults kept aside before and after mending, over the same cases."""
    if not again:
        return ""
    ids = {r.id for r in again}
    before = [r for r in results if r.id in ids]
    rows = []
    for name, chosen in (("one fault", single_faults), ("two faults", fault_pairs)):
        for class_ in CLASSES[:3]:
            first, second = (
                [r for r in chosen(found) if r.class_ == class_] for found in (before, again)
            )
            if first:
                rows.append((name, class_, share(first, _is("all")), share(second, _is("all"))))
    return (
        "Of what the faults kept aside had shown, two things were then mended, and the faults that "
        "had shown them were judged once more, alone and in pairs. That is no measure of unseen "
        "faults any longer:\n\n" + table(("", "effect", "kept aside, first", "once more"), rows)
    )


def _is(part: str) -> Callable[[Result], bool]:
    return lambda result: result.right[part]


def _placed(results: Iterable[Result]) -> list[Result]:
    return [r for r in results if any(t.where for t in r.truths)]


def _kinds(results: Sequence[Result]) -> str:
    rows = []
    for name, chosen in (
        ("one fault", single_faults(results)),
        ("two faults", fault_pairs(results)),
    ):
        for class_ in CLASSES:
            found = [r for r in chosen if r.class_ == class_]
            if found:
                rows.append((name, class_, len(found), *_apart(found, _is("all"))))
    return (
        f"*Strong*: the scores move by {STRONG:g} times what the clean engines differ by, or more; "
        "*weak*: by one to two times; *hidden*: by less, and the output of the operator by more "
        "than one rounding (root mean square); *invisible*: by less than a rounding there, too. Of "
        "two faults at once the effect is that of both together. "
        f"{sum(r.class_ == 'nothing' for r in results if r.truths)} plantings changed not a bit of "
        "this model on these tokens, and are not counted.\n\n"
        + table(("", "effect", "cases", "right, tuned on", "right, kept aside"), rows)
    )


def _scenes(results: Sequence[Result]) -> str:
    rows = []
    for scene in dict.fromkeys((r.row["model"], r.row["dtype"]) for r in results):
        mine = [r for r in results if (r.row["model"], r.row["dtype"]) == scene]
        strong = [r for r in single_faults(mine) if r.class_ == "strong"]
        pairs = [r for r in fault_pairs(mine) if r.class_ == "strong"]
        clean = clean_controls(mine)
        rows.append((*scene, share(strong, _is("all")), share(pairs, _is("all")), accused(clean)))
    head = ("model and engines", "dtype", "single, strong", "double, strong", "controls accused")
    return table(head, rows)


def _confusion(results: Sequence[Result]) -> str:
    strong = [r for r in single_faults(results) if r.class_ == "strong"]
    counts = figures.confusion(strong)
    said = sorted({name for row in counts.values() for name in row})
    shown = [name for name in said if name in counts] + [n for n in said if n not in counts]
    rows = [
        (f"**{planted}**", *(counts[planted][name] or "" for name in shown))
        for planted in sorted(counts)
    ]
    return "Strong single faults; rows are planted, columns said.\n\n" + table(("", *shown), rows)


def _cost(results: Sequence[Result]) -> str:
    rows = []
    for scene in dict.fromkeys((r.row["model"], r.row["dtype"]) for r in results):
        mine = [r for r in results if (r.row["model"], r.row["dtype"]) == scene]
        forwards, seconds = figures.cost(mine)
        rows.append((*scene, len(mine), f"{forwards:.0f}", f"{seconds:.1f}"))
    return (
        "Forwards of the common tail, each of what follows a layer boundary, and seconds of one "
        "CPU core of a shared machine; medians.\n\n"
        + table(("model and engines", "dtype", "cases", "forwards", "seconds"), rows)
    )


def _misses(results: Sequence[Result]) -> str:
    wrong = [
        r for r in (*single_faults(results), *fault_pairs(results))
        if not r.right["all"] and r.class_ in ("strong", "weak", "hidden")
    ]  # fmt: skip
    rows = [
        (
            r.id,
            r.class_,
            "aside" if r.row["held_out"] else "",
            figures.missed_why(r),
            explanation(r),
        )
        for r in sorted(wrong, key=lambda r: (CLASSES.index(r.class_), r.id))
    ]
    notes = "\n".join(f"{number}. {text}" for number, text in EXPLAINED.items())
    head = ("case", "effect", "", "what the verdict said", "why")
    return f"{notes}\n\n{table(head, rows)}"


def _small(results: Sequence[Result]) -> str:
    """Of hidden faults that were missed: what the verdict says that it could have seen."""
    missed = [r for r in single_faults(results) if r.class_ == "hidden" and not r.right["all"]]
    said = [r for r in missed if _seen(r)]
    text = (
        f"{len(missed)} faults below the floor in the scores and above a rounding in their output "
        f"were not found. In {len(said)} of them the verdict names the smallest gain that it could "
        "have seen there."
    )
    rows = [(r.id, f"{r.row['output']:.2g}", _seen(r) or "-") for r in missed]
    if not rows:
        return text
    return text + "\n\n" + table(("case", "output, in roundings", "smallest gain seen there"), rows)


def _seen(result: Result) -> str:
    """The smallest gain that the verdict says it could have seen in the operator that errs."""
    (truth,) = result.truths
    for one in result.answer.get("sensitivity", ()):
        if (one["operator"], one["side"]) == (truth.operator, truth.side):
            return f"{one['gain']:.2g}"
    return ""


def _controls(results: Sequence[Result]) -> str:
    described = {control.name: control.description for control in CONTROLS}
    rows = []
    for name in dict.fromkeys(r.row["names"][0] for r in clean_controls(results)):
        mine = [r for r in clean_controls(results) if r.row["names"][0] == name]
        worst = max((r.answer.get("gap") or {}).get("mae") or 0.0 for r in mine)
        rows.append((described.get(name, name), len(mine), f"{worst:.2g}", accused(mine)))
    return (
        f"{len(rows)} harmless differences, on either side and in each dtype where they can be.\n\n"
        + table(("difference", "cases", "largest mean gap (nat)", "accused"), rows)
    )


def _reports(results: Sequence[Result]) -> str:
    planted: dict[str, list[str]] = {}
    for fault in EVERYTHING:
        for report in fault.reports:
            planted.setdefault(report, []).append(fault.name)
    rows = []
    for report in sorted({*planted, *NOT_PLANTED}):
        if report not in planted:
            rows.append((_link(report), f"not planted: {NOT_PLANTED[report]}", ""))
            continue
        names = set(planted[report])
        mine = [r for r in results if len(r.row["names"]) == 1 and names & set(r.row["names"])]
        faults = [r for r in mine if r.truths and r.class_ not in ("invisible", "nothing")]
        clean = [r for r in mine if not r.truths]
        outcome = [f"right {share(faults, _is('all'))}"] if faults else []
        outcome += [f"accused {accused(clean)}"] if clean else []
        rows.append((_link(report), ", ".join(sorted(names)), "; ".join(outcome)))
    return table(("report", "planted as", "outcome, without the invisible"), rows)


def _link(report: str) -> str:
    repository, number = report.rsplit("#", 1) if "#" in report else (report, "")
    if number.isdigit():
        return f"[{report}](https://github.com/{repository}/issues/{number})"
    return report
