"""Plant a fault in one of two engines, find it, and say whether the verdict is right.

Two copies of one model play the engines, each with another of transformers' own implementations of
attention and experts, so that they differ by rounding as engines do. What finds the fault is given
two capture directories and the model, and nothing else.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from layerbisect.bisect.progress import NoProgress, Progress
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.errors import LayerBisectError
from layerbisect.demo_engines import NO_FAULT, Side, capture_both
from layerbisect.faults import FAULTS, Truth

DEFAULT_FAULT = "rope-shifted"


@dataclass(frozen=True, slots=True)
class Planted:
    """The truth, which a verdict is held against; None in a demo without a fault."""

    fault: str
    description: str
    layer: int | None
    operator: str
    point: str
    side: Side


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict, what was planted, and whether the one names the other and nothing else."""

    verdict: Verdict
    planted: Planted | None
    right: bool

    @property
    def exit_code(self) -> int:
        """The verdict's own where it is right, and 2 where it is wrong."""
        return self.verdict.exit_code if self.right else 2

    def mistakes(self) -> list[str]:
        """Say in what the verdict is wrong."""
        if self.right:
            return []
        if self.planted is None:
            return [f"nothing was planted, and the verdict is {self.verdict.status!r}"]
        if not self.verdict.culprits:
            return [f"nobody is convicted: the verdict is {self.verdict.status!r}"]
        first = self.verdict.culprits[0]
        facts = {
            "layer": (first.layer, self.planted.layer),
            "operator": (first.operator, self.planted.operator),
            "side": (first.side, self.planted.side),
        }
        wrong = [f"the {k} is {got}, not {want}" for k, (got, want) in facts.items() if got != want]
        others = [c.point for c in self.verdict.culprits[1:] if not _names(c, self.planted)]
        return wrong + [f"{point} is innocent" for point in others]

    def to_json(self) -> dict[str, Any]:
        """Return the verdict's JSON, and beside it under ``demo`` what was planted."""
        planted = None if self.planted is None else asdict(self.planted)
        demo = {"planted": planted, "right": self.right, "mistakes": self.mistakes()}
        return {**self.verdict.to_json(), "demo": demo}


def run_demo(
    *,
    fault: str = DEFAULT_FAULT,
    layer: int | None = None,
    side: Side = "rollout",
    keep: Path | None = None,
    model: Path | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Make two captures, one with a fault, and let them be judged.

    Args:
        fault: a name in `layerbisect.faults.FAULTS`, or ``none``.
        layer: where to plant it; the middle one where not given.
        side: which engine gets it.
        keep: a new or empty directory for model, tokens and captures; deleted where not given.
        model: a checkpoint to use instead of a tiny Qwen3-MoE.

    Raises:
        LayerBisectError: an unknown fault, a layer that is not there, a directory that is in use.
    """
    if fault != NO_FAULT and fault not in FAULTS:
        raise LayerBisectError(
            f"unknown fault {fault!r}: give {NO_FAULT} or one of {', '.join(FAULTS)}"
        )
    news = progress or NoProgress()
    with folder_for(keep) as folder, torch_threads(1 if model is None else None):
        if model is None:
            from layerbisect.models import make_tiny

            news.start("making a model", 1)
            model = make_tiny(folder / "model")
        truth = capture_both(folder, model, fault, layer, side, news)
        from layerbisect.bisect.locate import bisect

        verdict = bisect(folder / "rollout", folder / "trainer", model=model, progress=news)
    if keep is None:
        verdict = replace(verdict, next="`layerbisect demo --keep DIR` keeps the captures")
    return judged(verdict, truth, side)


def judged(verdict: Verdict, truth: Truth | None, side: Side) -> Outcome:
    """Hold a verdict against the truth: all that it convicts must be what was planted."""
    if truth is None:
        return held_against(verdict, None)
    planted = Planted(
        fault=truth.fault,
        description=FAULTS[truth.fault].description,
        layer=truth.layer,
        operator=truth.operator,
        point=truth.point,
        side=side,
    )
    return held_against(verdict, planted)


def held_against(verdict: Verdict, planted: Planted | None) -> Outcome:
    """Say whether all that a verdict convicts is what was planted, which may be nothing."""
    if planted is None:
        return Outcome(verdict, None, verdict.status == "agree")
    right = (
        verdict.status == "divergent"
        and bool(verdict.culprits)
        and all(_names(culprit, planted) for culprit in verdict.culprits)
    )
    return Outcome(verdict, planted, right)


def _names(culprit: Any, planted: Planted) -> bool:
    return (culprit.layer, culprit.operator, culprit.side) == (
        planted.layer,
        planted.operator,
        planted.side,
    )


@contextmanager
def folder_for(keep: Path | None) -> Iterator[Path]:
    """Yield the new or empty directory ``keep``, or one that is deleted at the end.

    Raises LayerBisectError where the directory is in use.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="layerbisect-demo-") as scratch:
            yield Path(scratch)
        return
    if keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        raise LayerBisectError(f"{keep} exists and is not empty: name a new directory to keep")
    was_there = keep.exists()
    keep.mkdir(parents=True, exist_ok=True)
    try:
        yield keep
    except BaseException:
        # a demo that broke off leaves nothing that looks like one
        shutil.rmtree(keep, ignore_errors=True)
        if was_there:
            keep.mkdir()
        raise


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Let torch use so many threads: a tiny model's steps are too small to share, and on a busy
    machine two threads wait for one another far longer than they compute.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
