"""Collect B: let rollout workers score saved responses again, by prefill from an empty cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np

from layerbisect.captures.errors import LayerBisectError, RecordError, WorkerError
from layerbisect.captures.record.call import Call, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.sglang.reply import ScoredResponse
from layerbisect.captures.sglang.worker import Worker
from layerbisect.captures.sglang.worker_info import vocabulary_of

BATCH = 64
"""Responses in one request, where the record does not say which were generated together."""


@dataclass(slots=True)
class WeightWatch:
    """Sees to it that every score comes from the same weights.

    ``version`` is the first that was seen and ``since`` who had it; ``digests`` keeps the first of
    each worker, and ``ask_digests`` says whether they are asked for.
    """

    version: str | None = None
    since: str = ""
    digests: dict[str, str | None] = field(default_factory=dict)
    ask_digests: bool = True

    def look(self, worker: Worker, when: str) -> None:
        """Ask a worker for its weights; raises WorkerError where they are not the first ones."""
        version = worker.weight_version()
        self.told(worker, () if version is None else (version,), when)
        if not self.ask_digests:
            return
        digest = worker.weights_digest()
        first = self.digests.setdefault(worker.url, digest)
        if digest != first:
            raise WorkerError(
                f"{worker.url} has weights of digest {digest} {when}, and had {first} before, "
                f"under the same weight version {version!r}; keep the weights frozen while scores "
                "are collected, and give each update a version"
            )

    def told(self, worker: Worker, versions: Sequence[str], when: str) -> None:
        """Take the versions that a worker named; raises WorkerError for another than the first."""
        for version in versions:
            if self.version is None:
                self.version, self.since = version, f"{worker.url} {when}"
            elif version != self.version:
                raise WorkerError(
                    f"{worker.url} has weight version {version!r} {when}, where {self.since} had "
                    f"{self.version!r}; keep the weights frozen while scores are collected"
                )

    def look_around(
        self,
        worker: Worker,
        model: str,
        workers: Sequence[Worker],
        router: Worker | None,
        when: str,
    ) -> None:
        """Find out, before anything is spent on ``worker``, whether the others serve the same.

        ``model`` is what it serves. Raises WorkerError: one is down, or serves another model or
        version.
        """
        for one in workers:
            info = one.info()
            _check_model(worker, model, one, info.model)
            self.told(one, () if info.weight_version is None else (info.weight_version,), when)
        if router is not None:
            _check_model(worker, model, router, router.model())


def _check_model(worker: Worker, model: str, other: Worker, others: str) -> None:
    # machines may mount one model in different places; that the weights are the same, digests say
    if model and others and Path(model).name != Path(others).name:
        raise WorkerError(
            f"{other.url} serves {others}, and {worker.url} serves {model}; name workers of one "
            "model"
        )


def replay(
    record: ScoreRecord,
    worker: Worker,
    path: str | os.PathLike[str],
    *,
    replays: int = 2,
    workers: Sequence[Worker] = (),
    router: Worker | None = None,
    weight_version: str | None = None,
    batches: Sequence[Sequence[str]] | None = None,
    digests: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreRecord:
    """Add columns B0, B1, ... to a record that has A: the saved tokens, scored by prefill.

    Every worker is asked first whether it is there and serves the same model. Each pass empties the
    worker's cache first and scores what was generated together together; the record is saved before
    the first pass, unless it has no scores yet or is there already, and after each.

    Args:
        record: what was generated. path: where it is kept; its own file is a good place.
        replays: passes on ``worker``, and as many through ``router``.
        workers: further workers, one pass each.
        weight_version: the version that the workers must have, where it is not A's: for a response
            that is carried across an update.
        batches: names of the calls that go in one request, where they are not those that A was
            generated in. With them a record need not have A.
        digests: ask the workers for checksums of their weights around each pass. That reads all
            weights, and an update that kept its version's name is not noticed without.
        progress: takes how many requests are done, and of how many; 0 as soon as they begin.

    Raises:
        RecordError: the record has neither A nor batches, or holds a call that token IDs alone
            cannot replay.
        WorkerError: a worker is down, slow, answers an error, other tokens, too few scores or no
            finite ones, used its cache, or has other weights; ``path`` keeps what was whole before.
    """
    check_replays(replays)
    if "A" not in record.info.columns and batches is None:
        raise RecordError("the record has no column A; collect A when the responses are generated")
    for call in record:
        _check_replayable(call)
    given = record.info.columns.get("A", Scoring())
    watch = WeightWatch(
        version=weight_version or given.weight_version,
        since="the caller" if weight_version else "A",
        digests={given.worker: given.digest} if given.digest and not weight_version else {},
        ask_digests=digests,
    )
    target = Path(path)
    if record.columns and not _is_file_of(record, target):
        record.save(target)
    together = _batches(record, given.batches if batches is None else batches)
    turns = [worker] * replays + list(workers) + ([router] * replays if router else [])
    ticks = count()

    def tick() -> None:
        done = next(ticks)
        if progress is not None:
            progress(done, len(turns) * len(together))

    columns = (name for name in map("B{}".format, count()) if name not in record.info.columns)
    try:
        if workers or router:
            watch.look_around(worker, worker.info().model, workers, router, "before the replays")
        tick()
        for one, column in zip(turns, columns, strict=False):
            record = _with_pass(record, column, one, one is router, together, watch, tick)
            record.save(target)
            tick()
    except WorkerError as error:
        if not record.columns:
            raise
        raise WorkerError(f"{error}; {target} keeps {', '.join(record.columns)}") from error
    return record


def _is_file_of(record: ScoreRecord, target: Path) -> bool:
    return record.path is not None and target.exists() and target.samefile(record.path)


def check_replays(replays: int) -> None:
    """Raise LayerBisectError for a number of passes that is none."""
    if replays < 0:
        raise LayerBisectError(f"there is no way to replay {replays} times; give 0 or more")


def _with_pass(
    record: ScoreRecord,
    column: str,
    worker: Worker,
    routed: bool,
    batches: Sequence[tuple[str, ...]],
    watch: WeightWatch,
    tick: Callable[[], None],
) -> ScoreRecord:
    # what a router says of itself is true of one of its workers; their answers say their own
    info = None if routed else worker.info()
    if not routed:
        watch.look(worker, f"before {column}")
    calls = {call.name: call for call in record}
    vocabulary = vocabulary_of(record.info.model) if info is None else info.vocabulary
    if info is not None:
        for call in record:
            info.check_tokens(f"call {call.name!r}", call.tokens.tolist())
    found: dict[str, ScoredResponse] = {}
    for number, names in enumerate(batches):
        if number:
            tick()
        worker.flush()
        found |= _scored([calls[name] for name in names], worker, vocabulary)
        for name in names:
            watch.told(worker, found[name].versions, f"in {column}")
    if not routed:
        watch.look(worker, f"after {column}")
    ranks = sorted({one.rank for one in found.values() if one.rank is not None})
    scoring = Scoring(
        engine=record.info.columns.get("A", Scoring()).engine if info is None else info.engine,
        worker="" if routed else worker.url,
        through=worker.url if routed else "",
        weight_version=watch.version,
        digest=watch.digests.get(worker.url),
        cache="flushed",
        batches=tuple(batches),
        settings={
            **({} if info is None else info.settings),
            **({"dp_ranks": ", ".join(map(str, ranks))} if ranks else {}),
        },
    )
    if info is not None and not record.info.model:
        record = ScoreRecord(replace(record.info, model=info.model), record)
    return record.with_column(
        column,
        {name: one.scores for name, one in found.items()},
        scoring,
        cached={name: one.cached for name, one in found.items()},
    )


def _scored(
    calls: Sequence[Call], worker: Worker, vocabulary: int | None
) -> Iterator[tuple[str, ScoredResponse]]:
    answers = worker.score(
        [call.tokens.tolist() for call in calls],
        [len(call.prompt) for call in calls],
        adapters=[call.context.get("adapter") for call in calls],
        vocabulary=vocabulary,
    )
    for call, answer in zip(calls, answers, strict=True):
        if answer.cached:
            raise WorkerError(
                f"{worker.url} read {answer.cached} of the {len(call.tokens)} tokens of call "
                f"{call.name!r} from its prefix cache right after emptying it; let nothing else "
                "use the worker while you collect"
            )
        yield call.name, answer


def _check_replayable(call: Call) -> None:
    unknown = sorted(call.context.keys() - {"adapter"})
    if unknown:
        raise RecordError(
            f"call {call.name!r} was generated with {unknown[0]} {call.context[unknown[0]]!r:.40}, "
            "which token IDs alone do not replay; leave it out"
        )
    if len(call.starts) > 1 or (call.positions != np.arange(len(call.positions))).any():
        raise RecordError(
            f"call {call.name!r} is packed or has positions of its own, and a worker scores a "
            "prompt and its response by themselves; record each call apart"
        )


def _batches(
    record: ScoreRecord, listed: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    names = record.names
    if sorted(name for batch in listed for name in batch) == sorted(names):
        return tuple(map(tuple, listed))
    return tuple(names[start : start + BATCH] for start in range(0, len(names), BATCH))
