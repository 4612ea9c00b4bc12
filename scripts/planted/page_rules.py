"""The benchmark's page: what simpler rules make of the same captures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from scripts.planted import figures
from scripts.planted.figures import Result, share
from scripts.planted.rules import COSINE, RELATIVE, RULES
from scripts.planted.sizes import SIZED

NAMES = {RELATIVE: "relative error", COSINE: "1 - cosine"}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows
    ]
    return "\n".join(lines)


def sizes_part(results: Sequence[Result]) -> str:
    sized = [r for r in results if r.kind == "size"]
    rows = []
    for model, dtype in dict.fromkeys((r.row["model"], r.row["dtype"]) for r in sized):
        controls = _of([r for r in results if not r.truths], (model, dtype))
        lowest = {rule: figures.strictest(controls, rule) for rule in RULES}
        for fault in SIZED:
            mine = [r for r in sized if r.row["dtype"] == dtype and _sized(r, fault.name)]
            if not mine:
                continue
            cells = [figures.smallest_found(mine, lambda r: r.right["all"])]
            for rule in RULES:
                for threshold in (figures.FIXED[rule], lowest[rule]):
                    cells.append(
                        figures.smallest_found(
                            mine,
                            _by_rule(rule, threshold),
                        )
                    )
            rows.append((fault.name, dtype, *("none" if c is None else f"{c:g}" for c in cells)))
    head = ["fault", "dtype", "layerbisect"]
    for rule in RULES:
        head += [f"{NAMES[rule]} > {figures.FIXED[rule]:g}", f"{NAMES[rule]}, lowest clean"]
    return (
        "The smallest size down to which every size is found (layer, operator and side of "
        "layerbisect; of the simple rules the layer alone), planted in the middle layer of the "
        "tiny model. *Lowest clean* is the lowest threshold at which a rule accuses no control.\n\n"
        + table(head, rows)
    )


def _sized(result: Result, name: str) -> bool:
    return str(result.row["names"][0]).rpartition(" ")[0] == name


def rules_part(results: Sequence[Result]) -> str:
    """How often each rule is right on strong single faults, and wrong on controls."""
    rows: list[tuple[str, ...]] = []
    singles = [r for r in results if r.kind == "single" and r.class_ == "strong"]
    clean = [r for r in results if not r.truths]
    for scene in dict.fromkeys((r.row["model"], r.row["dtype"]) for r in singles):
        mine, controls = _of(singles, scene), _of(clean, scene)
        found = share(mine, lambda r: r.right["layer"])
        rows.append((*scene, "layerbisect", "", found, accused(controls)))
        for rule in RULES:
            lowest = [figures.strictest(controls, rule)] if controls else []
            for threshold in (figures.FIXED[rule], *lowest):
                blamed = sum(figures.rule_layer(r, rule, threshold) is not None for r in controls)
                rows.append(
                    (
                        *scene,
                        f"first layer with {NAMES[rule]} above",
                        f"{threshold:.2g}",
                        share(mine, _by_rule(rule, threshold)),
                        f"{blamed} of {len(controls)}",
                    )
                )
    head = ("model", "dtype", "rule", "threshold", "layer right", "controls accused")
    return (
        "Strong single faults inside the model, in transformers pairs. The first threshold of each "
        "rule is one that people choose, the second the lowest at which it accuses no control, "
        "which nobody knows beforehand.\n\n" + table(head, rows)
    )


def _of(results: Iterable[Result], scene: tuple[str, str]) -> list[Result]:
    return [r for r in results if (r.row["model"], r.row["dtype"]) == scene]


def accused(controls: Sequence[Result]) -> str:
    return f"{sum(r.accused for r in controls)} of {len(controls)}"


def _by_rule(rule: str, threshold: float) -> Callable[[Result], bool]:
    return lambda result: figures.rule_right(result, rule, threshold)
