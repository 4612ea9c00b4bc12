"""Is the verdict right? Plant faults in real engines, let the locator judge, and publish the count.

::

    python -m scripts.accuracy run --work DIR --part tuning
    python -m scripts.accuracy page --work DIR --page docs/accuracy.md
    python -m scripts.accuracy summary --work DIR > accuracy.json

``run`` appends one line a case to ``DIR/results.jsonl``, and goes on where it was stopped. The
locator runs in processes of its own (`scripts.accuracy_locator`) and is told a folder's name alone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

import click
import torch

from layerbisect.models import make_smollm2, make_tiny
from scripts.planted import plan
from scripts.planted.case import Case, Made, clear, make
from scripts.planted.controls import make_near_tied
from scripts.planted.engine_case import hand_over, read_index
from scripts.planted.fault import Control
from scripts.planted.page import write_page
from scripts.planted.scene import Scene
from scripts.planted.summary import summarize

TINY: dict[str, Any] = dict(
    layers=6, hidden=128, heads=4, kv_heads=2, head_dim=32, experts=8, top_k=2, vocab=512
)
NEAR_TIED = "Qwen3-MoE with near ties"
MAKERS: dict[str, Callable[[Path], Path]] = {
    "tiny Qwen3-MoE": lambda directory: make_tiny(directory, **TINY),
    NEAR_TIED: make_near_tied,
    "SmolLM2-135M": make_smollm2,
}
"""Models; of the near-tied one the clean engines are controls, in every layout."""
LENGTHS = {"SmolLM2-135M": (3, 40)}
"""Sequences, and tokens of each response."""
PARTS = ("tuning", "held out", "all")
KINDS = {
    "single": plan.singles,
    "double": plan.pairs,
    "control": plan.controls,
    "size": plan.sizes,
}


class Locator:
    """A locator's process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "scripts.accuracy_locator"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def locate(self, folder: Path) -> dict[str, Any]:
        """What it answers about one folder."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the locator ended on {folder}: see what it printed")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Benchmark:
    """Makes cases, lets them be judged in the background, and keeps the results."""

    def __init__(self, work: Path, workers: int) -> None:
        self.work = work
        self.results = work / "results.jsonl"
        self.done = {row["id"] for row in read_results(work)}
        # of a run that was stopped
        shutil.rmtree(work / "cases", ignore_errors=True)
        self._pool = ThreadPoolExecutor(workers)
        self._locators = [Locator() for _ in range(workers)]
        self._room = Semaphore(workers + 2)
        self._lock = Lock()

    def judge(self, scene: Scene, model: str, case: Case) -> Future[None] | None:
        """Make a case and hand it over; None where it was judged before."""
        key = f"{model}, {scene.dtype}: {case.kind}: {case.name}"
        if key in self.done:
            return None
        self.done.add(key)
        self._room.acquire()
        start = time.perf_counter()
        made = make(scene, case, self.work / "cases" / f"{time.time_ns():x}")
        spent = time.perf_counter() - start
        meta = {
            "id": key,
            "kind": case.kind,
            "model": model,
            "dtype": scene.dtype,
            "names": [p.what.name for p in case.plants],
            "places": [[p.side, p.layer] for p in case.plants],
            "components": [getattr(p.what, "component", "control") for p in case.plants],
            "size": case.size,
            "held_out": case.held_out,
            "making_seconds": spent,
        }
        return self._pool.submit(self._ask, meta, made)

    def judge_engines(self, folder: Path) -> list[Future[None]]:
        """Hand over what `scripts.planted.engines` recorded."""
        asked = []
        for case in read_index(folder):
            key = f"real engines: {case.name}"
            if key in self.done:
                continue
            self._room.acquire()
            given = self.work / "cases" / f"{time.time_ns():x}"
            hand_over(case, given)
            meta = {
                "id": key,
                "kind": "engine",
                "model": "SGLang, megatron-core",
                "dtype": "bfloat16",
                "names": [case.name],
                "reports": case.reports,
                "components": [case.component or "control"],
                "size": None,
                "held_out": case.held_out,
            }
            made = Made(given, case.truths, case.effect, case.floor, case.output)
            asked.append(self._pool.submit(self._ask, meta, made))
        return asked

    def _ask(self, meta: dict[str, Any], made: Made) -> None:
        try:
            with self._lock:
                locator = self._locators.pop()
            answer = locator.locate(made.folder)
            row = meta | {
                "truths": [asdict(t) for t in made.truths],
                "effect": made.effect,
                "floor": made.floor,
                "output": made.output,
                "answer": answer,
            }
            with self._lock:
                self._locators.append(locator)
                with self.results.open("a") as out:
                    out.write(json.dumps(row) + "\n")
            clear(made)
        finally:
            self._room.release()

    def close(self) -> None:
        """Wait for all that is asked, and end the locators."""
        self._pool.shutdown()
        for locator in self._locators:
            locator.close()


def read_results(work: Path) -> list[dict[str, Any]]:
    """All results of a work directory, one a case."""
    path = work / "results.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def wanted(scene: Scene, kinds: tuple[str, ...], part: str) -> Iterator[Case]:
    """The scene's cases of these kinds, of one part or of all."""
    for kind in kinds:
        for case in KINDS[kind](scene):
            if part == "all" or kind == "control" or case.held_out == (part == "held out"):
                yield case


def unplanted(case: Case) -> bool:
    """Whether a case is a control in which the model computes as it is."""
    return all(isinstance(p.what, Control) and p.what.form is None for p in case.plants)


@click.group()
def main() -> None:
    """Measure how often the verdict is right."""


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--part", type=click.Choice(PARTS), default="all", show_default=True)
@click.option("--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True)
@click.option("--model", "models", type=click.Choice(list(MAKERS)), multiple=True)
@click.option("--dtype", "dtypes", type=click.Choice(["bfloat16", "float32"]), multiple=True)
@click.option("--only", default="", help="Cases whose name holds this text.")
@click.option("--workers", default=1, show_default=True, help="Locators that run side by side.")
def run(
    work: Path,
    part: str,
    kinds: tuple[str, ...],
    models: tuple[str, ...],
    dtypes: tuple[str, ...],
    only: str,
    workers: int,
) -> None:
    """Plant, capture and judge every case that has no result yet."""
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(work, workers)
    waiting = []
    for model in models or MAKERS:
        directory = work / model.replace(" ", "-")
        if not directory.exists():
            MAKERS[model](directory)
        for dtype in dtypes or ("bfloat16", "float32"):
            folder = work / f"{directory.name}-{dtype}"
            scene = Scene(directory, dtype, folder, *LENGTHS.get(model, ()))
            for case in wanted(scene, kinds or tuple(KINDS), part):
                if only in case.name and (model != NEAR_TIED or unplanted(case)):
                    asked = benchmark.judge(scene, model, case)
                    waiting += [asked] if asked else []
    for one in waiting:
        one.result()
    benchmark.close()
    click.echo(f"\n{len(waiting)} cases judged into {benchmark.results}", err=True)


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--recorded", type=click.Path(path_type=Path), help="DIR/engines where not given.")
@click.option("--workers", default=1, show_default=True, help="Locators that run side by side.")
def engines(work: Path, recorded: Path | None, workers: int) -> None:
    """Judge the cases of real engines that `scripts.planted.engines` recorded."""
    benchmark = Benchmark(work, workers)
    waiting = benchmark.judge_engines(recorded or work / "engines")
    for one in waiting:
        one.result()
    benchmark.close()
    click.echo(f"{len(waiting)} cases judged into {benchmark.results}", err=True)


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--again", type=click.Path(path_type=Path), help="The faults kept aside, once more.")
@click.option("--page", "target", type=click.Path(path_type=Path), required=True)
def page(work: Path, again: Path | None, target: Path) -> None:
    """Write the page from what was judged."""
    rows = read_results(work)
    if not rows:
        raise click.ClickException(f"{work} holds no results; run `accuracy run` first")
    target.write_text(write_page(rows, read_results(again) if again else ()))
    click.echo(f"{target}: {len(rows)} cases", err=True)


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
def summary(work: Path) -> None:
    """Print what was judged as JSON, which `layerbisect report` shows."""
    rows = read_results(work)
    if not rows:
        raise click.ClickException(f"{work} holds no results; run `accuracy run` first")
    click.echo(json.dumps({"schema": 1, "accuracy": asdict(summarize(rows))}, indent=2))


if __name__ == "__main__":
    main()
