"""A case of real engines, and the index that keeps what was planted apart from what is judged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerbisect.captures.store import Capture
from scripts.planted.fault import Truth

CASES, TRUTHS = "cases.json", "truths.json"


@dataclass(frozen=True, slots=True)
class Part:
    """One side of a case: some requests of a capture, and what to call them."""

    directory: Path
    label: str
    requests: str = "*"

    def open(self) -> Capture:
        """Open it, as the locator is given it."""
        return Capture.open(self.directory, label=self.label, requests=self.requests)


@dataclass(frozen=True, slots=True)
class EngineCase:
    """Two captures of the same tokens by real engines, and what was planted in one of them.

    Attributes:
        name: engine, layout and fault, for people; nothing that the locator is given has it.
        component: the place, in the reports' words; "" for a control.
        reports: the public issues that it is a reading of.
        rollout, trainer: the sides, labelled so, or ``decode`` and ``prefill``, or by layout.
        record: file of A, B and C, where the sides are a rollout and a trainer.
        model: the checkpoint directory that both loaded.
        truth: what a verdict must say; None for a control.
        engines: of either side, with the layout.
        held_out: whether the fault is among those kept aside.
        effect: what the fault changes in its own engine's scores (mean absolute, nat).
        floor: what both sides' scores of these tokens differ by without it.
        output: root mean square of what it changes at the first wrong point, in roundings to the
            dtype; nan where no capture shows it.
    """

    name: str
    component: str
    reports: tuple[str, ...]
    rollout: Part
    trainer: Part
    record: Path | None
    model: Path
    truth: Truth | tuple[Truth, ...] | None
    engines: tuple[str, str]
    held_out: bool
    effect: float = 0.0
    floor: float = 0.0
    output: float = 0.0

    @property
    def truths(self) -> tuple[Truth, ...]:
        """All that a verdict must say."""
        if self.truth is None:
            return ()
        return self.truth if isinstance(self.truth, tuple) else (self.truth,)


def write_index(folder: Path, cases: Iterable[EngineCase]) -> None:
    """Write what a locator may be given of each case, and beside it what was planted in which.

    Paths are relative to ``folder``; a case has the same key, a number, in both files.
    """
    given: dict[str, Any] = {}
    truths: dict[str, Any] = {}
    for number, case in enumerate(cases):
        held = asdict(case) | {"truth": [asdict(one) for one in case.truths]}
        sides = {side: held.pop(side) for side in ("rollout", "trainer")}
        for side in sides.values():
            side["directory"] = str(side["directory"].relative_to(folder))
        record, model = held.pop("record"), held.pop("model")
        key = f"case-{number:03}"
        given[key] = sides | {
            "record": None if record is None else str(record.relative_to(folder)),
            "model": str(model.relative_to(folder)),
        }
        truths[key] = held
    for name, index in ((CASES, given), (TRUTHS, truths)):
        (folder / name).write_text(json.dumps(index, indent=1) + "\n")


def read_index(folder: Path) -> Iterator[EngineCase]:
    """The cases of :func:`write_index`; no engine is needed."""
    given, truths = (json.loads((folder / name).read_text()) for name in (CASES, TRUTHS))
    for key, case in given.items():
        held = truths[key]
        told = tuple(Truth(**truth) for truth in held.pop("truth"))
        first, second = held.pop("engines")
        sides: dict[str, Any] = {
            side: Part(**case[side] | {"directory": folder / case[side]["directory"]})
            for side in ("rollout", "trainer")
        }
        yield EngineCase(
            **held | {"reports": tuple(held["reports"])},
            **sides,
            record=None if case["record"] is None else folder / case["record"],
            model=folder / case["model"],
            truth=told if told[1:] else told[0] if told else None,
            engines=(first, second),
        )


def hand_over(case: EngineCase, folder: Path) -> None:
    """Lay out what a locator is given in ``folder``, which must not exist: links with plain names.

    ``sides.json`` has each side's label and the pattern of its requests.
    """
    folder.mkdir(parents=True)
    sides = {"rollout": case.rollout, "trainer": case.trainer}
    links = {name: part.directory for name, part in sides.items()} | {"model": case.model}
    if case.record is not None:
        links["record.safetensors"] = case.record
    for name, target in links.items():
        (folder / name).symlink_to(target.resolve())
    told = {name: {"label": p.label, "requests": p.requests} for name, p in sides.items()}
    (folder / "sides.json").write_text(json.dumps(told))
