"""A self-test: what was planted on this machine, what the verdict said, and whether it is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerbisect.bisect.verdict import Status
from layerbisect.bisect.verdict_json import record_from_json
from layerbisect.demo import Planted
from layerbisect.report.blocks import Block, Cell, Facts, Section, Table
from layerbisect.selftest import LeftOut, Setting
from layerbisect.terminal.selftest import left_out_words, place
from layerbisect.wording import count


@dataclass(frozen=True, slots=True)
class SaidCulprit:
    """Whom a run's verdict names."""

    layer: int | None
    point: str
    operator: str | None
    side: str


@dataclass(frozen=True, slots=True)
class SaidRun:
    """A run, as its JSON has it; ``planted`` is None of the clean pair."""

    planted: Planted | None
    status: Status
    reasons: tuple[str, ...]
    culprits: tuple[SaidCulprit, ...]
    right: bool
    mistakes: tuple[str, ...]
    seconds: float
    captures: str | None = None


@dataclass(frozen=True, slots=True)
class SaidSelfTest:
    """A self-test, as its JSON has it."""

    passed: bool
    found: int
    planted: int
    wanted: int
    clean_accused: bool
    setting: Setting
    tried: tuple[SaidRun, ...]
    left_out: tuple[LeftOut, ...]


def said_selftest(data: Mapping[str, Any]) -> SaidSelfTest:
    """Check what `layerbisect selftest --json` printed, and that its sums are those of its runs.

    Raises ValueError, which names the field, where it did not.
    """
    said = record_from_json(SaidSelfTest, data)
    if not said.tried or said.tried[0].planted is not None:
        raise ValueError("tried: the clean pair must come first")
    clean, *runs = said.tried
    for number, run in enumerate(said.tried):
        if not run.seconds >= 0:
            raise ValueError(f"tried[{number}].seconds: they were counted, got {run.seconds}")
    if any(run.planted is None for run in runs):
        raise ValueError("tried: a run after the clean pair must have something planted")
    sums = {
        "passed": all(run.right for run in said.tried),
        "found": sum(run.right for run in runs),
        "planted": len(runs),
        "clean_accused": not clean.right,
    }
    for name, wanted in sums.items():
        if getattr(said, name) != wanted:
            raise ValueError(f"{name}: the runs make it {wanted}, got {getattr(said, name)}")
    return said


def selftest_section(data: Mapping[str, Any]) -> Section:
    """Every run of what `layerbisect selftest --json` printed, and what could not be planted.

    ``data`` is of `said_selftest`'s shape.
    """
    blocks: list[Block] = [_runs(data)]
    if data["left_out"]:
        said = [
            left_out_words(one["fault"], one["why"], one["instead"]) for one in data["left_out"]
        ]
        blocks.append(Facts(tuple(("", text) for text in said), "What could not be planted"))
    setting = data["setting"]
    facts = (
        ("engines", setting["engines"]),
        ("model", f"{setting['model']}, {count(setting['layers'], 'layer')}"),
        ("computed in", f"{setting['dtype']} on {setting['device']}"),
    )
    blocks.append(Facts(facts, "What was tested"))
    clean = "was accused" if data["clean_accused"] else "was not accused"
    lead = (
        f"{data['found']} of {count(data['planted'], 'planted fault')} named rightly (layer, "
        f"operator and side, and nobody else), and the pair without a fault {clean}."
    )
    if data["planted"] < data["wanted"]:
        lead += f" There should be {data['wanted']}: nothing was left to plant instead."
    return Section("selftest", "Self-test on this machine", lead, tuple(blocks))


def planted_words(planted: Mapping[str, Any] | None) -> str:
    """Say what was planted and where."""
    if planted is None:
        return "nothing"
    where = place(planted["layer"], planted["operator"], planted["side"])
    return f"{planted['fault']}: {where}"


def named_words(tried: Mapping[str, Any]) -> str:
    """Say what the verdict of a run names: all its culprits, or its status where there are none."""
    named = [place(one["layer"], one["operator"], one["side"]) for one in tried["culprits"]]
    return "; ".join(named) or str(tried["status"])


def _runs(data: Mapping[str, Any]) -> Table:
    rows = []
    kept = any(one.get("captures") for one in data["tried"])
    for number, one in enumerate(data["tried"]):
        right = bool(one["right"])
        planted = one["planted"]
        cells = [
            Cell(str(number) if number else "clean", number=True),
            Cell(planted_words(planted), strong=True),
            Cell("" if planted is None else planted["description"]),
            Cell(named_words(one)),
            Cell("right" if right else "WRONG", strong=not right),
            Cell("; ".join(one["mistakes"])),
            Cell(f"{one['seconds']:.1f}", number=True),
        ]
        rows.append((*cells, *([Cell(one.get("captures") or "")] * kept)))
    head: tuple[str, ...] = (
        "run",
        "planted",
        "what it does",
        "the verdict says",
        "it is",
        "mistakes",
        "seconds",
    )
    # a column that says nothing is none
    shown = [at for at in range(len(head)) if at != 5 or any(row[5].text for row in rows)]
    shown += [len(head)] * kept
    head += ("captures",)
    return Table(
        "What was planted, and what the verdict says of it",
        tuple(head[at] for at in shown),
        tuple(tuple(row[at] for at in shown) for row in rows),
    )
