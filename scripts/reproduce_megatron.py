"""The trainer of the published experiments as a job on the real megatron-core; C from its captures.

The job's ranks live beside the server that generates, and are told what to do in between.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from layerbisect.captures.record.alignment import aligned_scores
from layerbisect.captures.record.call import Scoring
from layerbisect.captures.record.captured import score_from_capture
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.weights.store import WeightSnapshot
from scripts.megatron_actor import STOP, write_json
from scripts.megatron_engine import run_job
from scripts.megatron_model import Layout
from scripts.reproduce_runs import LEARNING_RATE, reward

LAYOUTS = {
    "one": Layout(),
    "pp2": Layout(pipeline=2),
    "ep2": Layout(expert=2),
    "pp2-ep2": Layout(pipeline=2, expert=2),
}
"""Layouts that a CPU can train; the published job had PP 2, CP 2 and EP 4."""

REPEATS = 2
_JOB_SECONDS = 1200.0
_ANSWER_SECONDS = 300.0


@dataclass(slots=True)
class Job:
    """A running actor; see scripts/megatron_actor.py."""

    model: Path
    folder: Path
    layout: Layout
    ended: Future[Any]
    told: int = 0

    def ask(self, do: str, **given: Any) -> list[Any]:
        """Let all ranks do one thing; returns each one's answer.

        Raises JobError where a rank fails, and TimeoutError where one does not answer.
        """
        number, self.told = self.told, self.told + 1
        write_json(self.folder / f"{number}.json", {"do": do, **given})
        files = [self.folder / f"{number}.{rank}.json" for rank in range(self.layout.ranks)]
        end = time.monotonic() + _ANSWER_SECONDS
        while not all(file.exists() for file in files):
            if self.ended.done():
                self.ended.result()
            if time.monotonic() > end:
                raise TimeoutError(f"{do!r} was not done in {_ANSWER_SECONDS:g} s")
            time.sleep(0.02)
        return [json.loads(file.read_text()) for file in files]

    def described(self) -> dict[str, str]:
        """Say in words what runs."""
        sizes = {"PP": self.layout.pipeline, "EP": self.layout.expert}
        cut = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        ranks = f"{cut} on {self.layout.ranks} processes" if cut else "one process"
        return {"ranks": ranks, "version": version("megatron-core")}


@contextmanager
def actor_job(model: Path, folder: Path, layout: Layout) -> Iterator[Job]:
    """Start an actor of ``model`` without waiting for it; it ends with the context."""
    folder.mkdir(parents=True)
    step = {
        "do": "scripts.megatron_actor:serve",
        "folder": str(folder.resolve()),
        "learning_rate": LEARNING_RATE,
    }
    given = {"model": str(model.resolve()), "steps": [step]}
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run_job, given, layout, timeout=_JOB_SECONDS)
        job = Job(model, folder, layout, ended)
        try:
            yield job
        finally:
            write_json(folder / f"{job.told}.json", {"do": STOP})
    ended.result()


@dataclass(slots=True)
class MegatronTrainer:
    """The policy in a job, from T0 on; a `Trainer` whose C comes from captures."""

    job: Job
    offset: float = 0.0
    updates: int = 0
    held: Path = field(init=False)

    def __post_init__(self) -> None:
        self.held = self.job.model
        self.job.ask("load", checkpoint=str(self.job.model.resolve()))

    def collect(self, record: ScoreRecord, path: Path) -> ScoreRecord:
        """Score twice, frozen; C is what the capture of these forwards has."""
        self._score(record, path)
        return score_from_capture(record, _capture(path), path, weight_version=self._version)

    def returned(self, record: ScoreRecord, path: Path) -> ScoreRecord:
        """Score twice, frozen; C is what the job's scoring function returned."""
        answers = self._score(record, path)
        how = Scoring(
            engine=f"megatron-core {version('megatron-core')}", weight_version=self._version
        )
        for repeat in range(REPEATS):
            column = aligned_scores(list(record), [scores[repeat] for scores in answers])
            record = record.with_column(f"C{repeat}", column, how)
        record.save(path)
        return record

    def captured(self, record: ScoreRecord, path: Path) -> ScoreRecord:
        """What `returned` scored, with C from the capture of the same forwards."""
        columns = [f"C{repeat}" for repeat in range(REPEATS)]
        return score_from_capture(record.without(*columns), _capture(path))

    @property
    def _version(self) -> str:
        return f"T{self.updates}"

    def _score(self, record: ScoreRecord, path: Path) -> list[list[list[float]]]:
        """What was returned for each call in each repeat."""
        capture = str(_capture(path).resolve())
        answers = self.job.ask(
            "score", calls=_calls(record), capture=capture, repeats=REPEATS, offset=self.offset
        )
        by_number = {int(n): scores for answer in answers for n, scores in answer.items()}
        return [by_number[number] for number in range(len(record))]

    def changes(self, record: ScoreRecord) -> list[str]:
        """Watch both stages of scoring, and name what changed the scores between them."""
        answers = self.job.ask("watch", calls=_calls(record), offset=self.offset)
        return sorted({change for answer in answers for change in answer})

    def update(self, record: ScoreRecord) -> float:
        """Take one step of AdamW on rewards of -1 and +1 for the two samples of each prompt."""
        rewards = [reward(call) for call in record]
        losses = self.job.ask("update", calls=_calls(record), rewards=rewards)
        self.updates += 1
        return float(sum(losses))

    def save(self, folder: Path) -> Path:
        """Write a snapshot of the ranks' weights, and the checkpoint made of it."""
        self.held = folder / f"{self._version}.megatron"
        self.job.ask("save", directory=str(self.held.resolve()), version=self._version)
        return export(self.held, self.job.model, folder / self._version)


def _capture(path: Path) -> Path:
    return path.with_name(path.name.replace(".safetensors", ".capture"))


def _calls(record: ScoreRecord) -> list[tuple[list[int], int]]:
    return [(call.tokens.tolist(), len(call.prompt)) for call in record]


def export(snapshot: Path, model: Path, target: Path) -> Path:
    """Make a checkpoint of a weight snapshot, with the configuration of ``model``.

    Raises ValueError where ranks are missing, or hold different copies.
    """
    held = WeightSnapshot.open(snapshot)
    tensors, problems = {}, list(held.problems)
    for name in held.names():
        whole = held.tensor(name)
        tensors[name] = whole.values.contiguous()
        problems += whole.disagreements
    if problems:
        raise ValueError(f"{snapshot} makes no checkpoint: {problems[0]}")
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    shutil.copy(model / "config.json", target)
    return target
