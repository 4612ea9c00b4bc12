"""Plant ten faults one after another on this machine's engines, and see whether each is found.

A pair without a fault comes first, and must not be accused. What finds the faults is given the
captures of two sides and a model directory, and nothing else; see :mod:`layerbisect.demo`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from layerbisect.bisect.progress import Progress
from layerbisect.captures.errors import LayerBisectError
from layerbisect.demo import Outcome, folder_for, held_against, torch_threads
from layerbisect.demo_engines import Side
from layerbisect.selftest_engines import CLEAN, Bench, CannotPlant

EngineName = Literal["transformers", "sglang"]
TINY: dict[str, Any] = dict(
    layers=6, hidden=128, heads=4, kv_heads=2, head_dim=32, experts=8, top_k=2, vocab=512
)
"""The model that is made where none is given."""
TINY_LENGTH = 160
"""Tokens a sequence of it."""

WANTED = (
    "norm-weight",
    "rope-shifted",
    "softmax-scale",
    "kv-heads-regrouped",
    "o-proj-permuted",
    "residual-dropped",
    "router-low-precision",
    "mask-off-by-one",
    "experts-swapped",
    "head-scaled",
)
"""One or two faults of each operator; sides alternate, and first, middle and last layer."""
INSTEAD = (
    "rope-base",
    "final-norm-weight",
    "qk-norm-skipped",
    "gate-up-swapped",
    "top-k-not-renormalised",
    # within rounding where the stream is large
    "norm-eps",
)
"""Taken in this order for what a model or an engine cannot have."""
SIDES: tuple[Side, Side] = ("rollout", "trainer")


@dataclass(frozen=True, slots=True)
class Tried:
    """One run: what came of it, and its seconds.

    ``captures`` are both sides' as `layerbisect bisect` takes them, None where they were deleted.
    """

    outcome: Outcome
    seconds: float
    captures: str | None

    def to_json(self) -> dict[str, Any]:
        """Return it with the part of the verdict that is judged."""
        planted, verdict = self.outcome.planted, self.outcome.verdict
        return {
            "planted": None if planted is None else asdict(planted),
            "status": verdict.status,
            "reasons": list(verdict.reasons),
            "culprits": [
                {"layer": c.layer, "point": c.point, "operator": c.operator, "side": c.side}
                for c in verdict.culprits
            ],
            "right": self.outcome.right,
            "mistakes": self.outcome.mistakes(),
            "seconds": round(self.seconds, 2),
            "captures": self.captures,
        }


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A fault that was not planted, why, and what was planted instead, if anything."""

    fault: str
    why: str
    instead: str | None


@dataclass(frozen=True, slots=True)
class Setting:
    """What is tested: engines and model in words, dtype and device as torch names them."""

    engines: str
    model: str
    layers: int
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    """All runs of a self-test; ``wanted`` is how many faults there should be."""

    setting: Setting
    tried: tuple[Tried, ...]
    left_out: tuple[LeftOut, ...]
    wanted: int

    @property
    def faults(self) -> tuple[Tried, ...]:
        """The runs in which a fault was planted."""
        return self.tried[1:]

    @property
    def found(self) -> int:
        """How many faults were named rightly: layer, operator and side, and nothing else."""
        return sum(one.outcome.right for one in self.faults)

    @property
    def clean_accused(self) -> bool:
        """Whether the pair without a fault was called anything but in agreement."""
        return not self.tried[0].outcome.right

    @property
    def passed(self) -> bool:
        """Whether every verdict is right."""
        return all(one.outcome.right for one in self.tried)

    @property
    def exit_code(self) -> int:
        """0 where every verdict is right, else 1."""
        return 0 if self.passed else 1

    def to_json(self) -> dict[str, Any]:
        """Return everything as data."""
        return {
            "schema": 1,
            "passed": self.passed,
            "found": self.found,
            "planted": len(self.faults),
            "wanted": self.wanted,
            "clean_accused": self.clean_accused,
            "setting": asdict(self.setting),
            "tried": [one.to_json() for one in self.tried],
            "left_out": [asdict(one) for one in self.left_out],
        }


def run_selftest(
    watched: Callable[[], AbstractContextManager[Progress]],
    *,
    model: Path | None = None,
    engine: EngineName = "transformers",
    device: str | None = None,
    dtype: str | None = None,
    keep: Path | None = None,
    faults: int = len(WANTED),
    begin: Callable[[Setting], None] = lambda setting: None,
    tell: Callable[[Tried], None] = lambda tried: None,
) -> SelfTest:
    """Run a clean pair and then planted faults, and judge the verdict on each.

    Args:
        watched: opens what shows progress, anew for each run.
        model: a checkpoint to use instead of a tiny Qwen3-MoE.
        engine: who plays the rollout; the trainer is transformers.
        device: as torch names it; ``cuda`` if there is one, else ``cpu``, where not given.
        dtype: as torch names it; the checkpoint's own where not given.
        keep: a new or empty directory for model, tokens and captures; deleted where not given.
        faults: how many of `WANTED`.
        begin: told once what is about to be tested. tell: told of each run as it is judged.

    Raises:
        LayerBisectError: what cannot be run here, in one sentence.
    """
    with folder_for(keep) as folder, torch_threads(1 if model is None else None):
        with watched() as news:
            made = model is None
            if model is None:
                from layerbisect.models import make_tiny

                news.start("making a model", 1)
                model = make_tiny(folder / "model", **TINY)
            bench = _kind(engine)(model, folder, device or _device(), dtype)
            if made:
                bench.length, bench.probe = TINY_LENGTH, "auto"
        with closing(bench):
            with watched() as news:
                bench.open(news)
            setting = Setting(
                engines=bench.describe(),
                model="a tiny Qwen3-MoE made for this" if made else str(model),
                layers=bench.layers,
                dtype=bench.computed_in,
                device=bench.device,
            )
            begin(setting)
            tried, left_out = _try_all(bench, watched, faults, keep is not None, tell)
        done = SelfTest(setting, tuple(tried), tuple(left_out), faults)
        if keep is not None:
            text = json.dumps(done.to_json(), indent=2)
            (folder / "selftest.json").write_text(text + "\n", encoding="utf-8")
    return done


def _try_all(
    bench: Bench,
    watched: Callable[[], AbstractContextManager[Progress]],
    faults: int,
    kept: bool,
    tell: Callable[[Tried], None],
) -> tuple[list[Tried], list[LeftOut]]:
    places = (0, bench.layers // 2, bench.layers - 1)
    tried: list[Tried] = []
    left_out: list[LeftOut] = []

    def add(one: Tried) -> None:
        tried.append(one)
        tell(one)

    # nothing is told while a bar is on the screen
    with watched() as news:
        clean = _judged(bench, CLEAN, None, 0, news, kept=kept)
    add(clean)
    spare, runs = list(INSTEAD), count(CLEAN + 1)
    for slot, name in enumerate(WANTED[:faults]):
        layer, side = places[slot % len(places)], SIDES[slot % len(SIDES)]
        refused: list[tuple[str, str]] = []
        planted: str | None = name
        while planted is not None:
            number = next(runs)
            try:
                with watched() as news:
                    one = _judged(bench, number, planted, layer, news, side, kept=kept)
                add(one)
                break
            except CannotPlant as error:
                refused.append((planted, str(error)))
                bench.forget(number)
                planted = spare.pop(0) if spare else None
        if not kept:
            bench.forget(number)
        left_out += [LeftOut(fault, why, planted) for fault, why in refused]
    if len(tried) == 1:
        raise LayerBisectError(f"no fault can be planted here: {left_out[0].why}")
    return tried, left_out


def _judged(
    bench: Bench,
    number: int,
    fault: str | None,
    layer: int,
    news: Progress,
    side: Side = "rollout",
    *,
    kept: bool,
) -> Tried:
    """Plant one fault, or none, and let the captures be judged."""
    from layerbisect.bisect.locate import bisect

    since = time.monotonic()
    planted = None if fault is None else bench.plant(fault, layer, side, number, news)
    runs = [(one, number if one == side else CLEAN) for one in SIDES]
    rollout, trainer = (bench.source(*run) for run in runs)
    verdict = bisect(rollout, trainer, model=bench.model, probe=bench.probe, progress=news)
    seconds = time.monotonic() - since
    captures = " ".join(bench.argument(*run) for run in runs) if kept else None
    return Tried(held_against(verdict, planted), seconds, captures)


def _kind(engine: EngineName) -> type[Bench]:
    if engine == "transformers":
        return Bench
    from layerbisect.selftest_server import ServerBench

    return ServerBench


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
