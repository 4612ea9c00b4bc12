"""The benchmark's cases: what is planted where, and the folder that the locator is given."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from layerbisect.captures.store import Capture
from scripts.planted.control_runs import run_control
from scripts.planted.fault import Control, ModelFault, ScoreFault, Side, Truth, held_out
from scripts.planted.scene import PASSES, Pass, Run, Scene, write_record

Kind = Literal["single", "score", "double", "control", "size"]


@dataclass(frozen=True, slots=True)
class Plant:
    """One fault or control in one place; ``layer`` is None where its form ignores it."""

    what: ModelFault | ScoreFault | Control
    side: Side
    layer: int | None = None

    def truth(self, scene: Scene) -> Truth | None:
        """What a verdict must say of it, None of a control."""
        if isinstance(self.what, Control):
            return None
        if isinstance(self.what, ScoreFault):
            return self.what.truth()
        layer = self.layer or 0
        return self.what.truth(layer, self.side, sparse=scene.sparse(layer))

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that it changes."""
        if self.side == "trainer":
            return ("trainer",)
        if not isinstance(self.what, ModelFault):
            return ("prefill",)
        return ("decode", "prefill") if self.what.passes == "both" else (self.what.passes,)

    @property
    def place(self) -> str:
        """Where it is, for a name."""
        return self.side if self.layer is None else f"{self.side} {self.layer}"


@dataclass(frozen=True, slots=True)
class Case:
    """What is planted in a pair of engines; ``size`` is of a fault that comes in sizes."""

    kind: Kind
    plants: tuple[Plant, ...]
    size: float | None = None

    @property
    def name(self) -> str:
        """Its name, the same in every run."""
        return " + ".join(f"{plant.what.name} ({plant.place})" for plant in self.plants)

    @property
    def held_out(self) -> bool:
        """Whether any of its faults is kept aside while the method is tuned."""
        return any(held_out(plant.what.name) for plant in self.plants)


@dataclass(frozen=True, slots=True)
class Made:
    """A case's folder, and how large its faults are.

    ``effect`` is what the largest changes in its own engine's scores (mean absolute, nat), and
    ``floor`` what the clean engines differ by; ``output`` is the root mean square of what changes
    at the first wrong point, in units of what one rounding to the dtype makes there. nan where it
    is not known.
    """

    folder: Path
    truths: tuple[Truth, ...]
    effect: float
    floor: float
    output: float


def make(scene: Scene, case: Case, folder: Path) -> Made:
    """Plant a case and write what the locator is given into ``folder``, which must not exist."""
    folder.mkdir(parents=True)
    runs: dict[Pass, Run] = dict(scene.clean)
    for plant in case.plants:
        if isinstance(plant.what, Control):
            name: Pass = "trainer" if plant.side == "trainer" else "prefill"
            runs[name] = run_control(scene, plant.what, plant.side, folder / f"run-{plant.side}")
    changed = [p for p in PASSES if any(_in(plant, p) for plant in case.plants)]
    for name in changed:
        forms = [
            plant.what.form(scene.engines[plant.side], plant.layer or 0)
            for plant in case.plants
            if _in(plant, name) and isinstance(plant.what, ModelFault)
        ]
        runs[name] = scene.run(name, folder / f"run-{PASSES.index(name)}", forms)
    decoding = any(
        isinstance(p.what, ModelFault) and p.what.passes == "decode" for p in case.plants
    )
    shown: dict[Side, Pass] = {"rollout": "decode" if decoding else "prefill", "trainer": "trainer"}
    for side, name in shown.items():
        (folder / side).symlink_to(runs[name].directory.resolve())
    (folder / "model").symlink_to(scene.model.resolve())
    scored = scene.scored(runs)
    for plant in case.plants:
        if isinstance(plant.what, ScoreFault):
            plant.what.change(scored)
    write_record(scored, folder / "record.safetensors")
    floor = _gap(scene.clean["prefill"], scene.clean["trainer"])
    effects = [_gap(runs[name], scene.clean[name]) for name in changed]
    if any(isinstance(plant.what, ScoreFault) for plant in case.plants):
        before = scene.scored(runs).scores
        columns = ("A", "B0", "C0")
        effects += [_difference(scored.scores[c], before[c]) for c in columns]
    return Made(
        folder=folder,
        truths=tuple(t for plant in case.plants if (t := plant.truth(scene)) is not None),
        effect=max(effects, default=0.0),
        floor=floor,
        output=_output(scene, case, {p: runs[p] for p in changed}),
    )


def _in(plant: Plant, name: Pass) -> bool:
    return isinstance(plant.what, ModelFault) and name in plant.passes


def _gap(one: Run, other: Run) -> float:
    return _difference(one.scores, other.scores)


def _difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Mean absolute difference; infinite where a score that was there is none any more."""
    off = np.abs(np.concatenate(one) - np.concatenate(other))
    return float(off.mean()) if np.isfinite(off).all() else math.inf


def _output(scene: Scene, case: Case, changed: dict[Pass, Run]) -> float:
    """How far the first wrong point of a single fault is off, in roundings."""
    if len(case.plants) != 1 or not changed:
        return math.nan
    (plant,) = case.plants
    assert isinstance(plant.what, ModelFault)
    name = next(iter(changed))
    point = plant.what.point_in(plant.layer or 0)
    wrong, right = (Capture.open(runs[name].directory) for runs in (changed, scene.clean))
    if not wrong.has(point).all() or point.endswith("expert_ids"):
        return math.nan
    values = [torch.from_numpy(c.read(point).copy()).double() for c in (wrong, right)]
    if not all(bool(v.isfinite().all()) for v in values):
        return math.inf
    off = float((values[0] - values[1]).square().mean().sqrt())
    # a rounding error is spread evenly over half a spacing to either side
    spacing = torch.finfo(getattr(torch, scene.dtype)).eps
    rounding = float(values[1].square().mean().sqrt()) * spacing / math.sqrt(12)
    return off / rounding if rounding else math.inf


def clear(made: Made) -> None:
    """Take a case's folder away again."""
    shutil.rmtree(made.folder)
