"""Gather the rows of a capture's passes: merged over ranks, sequences numbered by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import Phase, SequenceInfo
from layerbisect.captures.passfile import PassFile
from layerbisect.captures.rows import Rows, find
from layerbisect.captures.vocab_scores import ShardScores, combine, padding_problem


@dataclass(frozen=True, slots=True)
class JointPass:
    """One forward pass of all ranks.

    ``start`` is where its rows begin among the capture's; ``local[r]`` (int [row]) gives each row's
    place in the file of ``ranks[r]``, or -1.
    """

    phase: Phase
    ranks: tuple[PassFile, ...]
    local: tuple[NDArray[np.intp], ...]
    rows: Rows
    start: int


class Gatherer:
    """Collects rows over passes, numbering sequences by name and keeping those that match."""

    def __init__(self, requests: str) -> None:
        self.passes: list[JointPass] = []
        self.sequences: list[SequenceInfo] = []
        self.names: set[str] = set()
        self._problems: list[str] = []
        self._leaks: list[tuple[float, int]] = []
        self._requests = requests
        self._number: dict[str, int] = {}
        self._seen: list[Rows] = []
        self._scored: list[Rows] = []
        self._logprobs: list[NDArray[np.float64]] = []
        self._start = 0

    def add(self, ranks: tuple[PassFile, ...]) -> None:
        """Take in one pass of all ranks."""
        numbers = [self._numbers(file) for file in ranks]
        tables = [_renumber(file.rows, n) for file, n in zip(ranks, numbers, strict=True)]
        rows = _union([table for table, _ in tables])
        if len(rows):
            local = tuple(_places(table, kept, rows) for table, kept in tables)
            self.passes.append(JointPass(ranks[0].header.phase, ranks, local, rows, self._start))
            self._start += len(rows)
        # rows that differ between ranks too, so that two tokens at one position are noticed
        if rows is not tables[0][0]:
            self._seen += [table for table, _ in tables]
        self._seen += [_renumber(f.context, n)[0] for f, n in zip(ranks, numbers, strict=True)]
        # every rank that scores has the same scores: one of them is enough
        for file, number in zip(ranks, numbers, strict=True):
            scored, kept = _renumber(file.scored, number)
            if len(scored):
                self._scored.append(scored)
                self._logprobs.append(np.asarray(file.logprob[kept], np.float64))
                break
        else:
            self._add_shards(ranks, numbers, rows)

    def _add_shards(
        self, ranks: Sequence[PassFile], numbers: Sequence[NDArray[np.int32]], rows: Rows
    ) -> None:
        parts = [
            _renumber_shard(file.shard, number).resolved(rows)
            for file, number in zip(ranks, numbers, strict=True)
            if file.shard is not None
        ]
        scored, logprob, problem, leak = combine(parts)
        if problem and problem not in self._problems:
            self._problems.append(problem)
        self._leaks.append((leak, len(scored)))
        self._scored.append(scored)
        self._logprobs.append(logprob)

    def _numbers(self, file: PassFile) -> NDArray[np.int32]:
        """Number a file's sequences among the capture's, -1 for those that do not match."""
        for sequence in file.header.sequences:
            number = self._number.get(sequence.name)
            if number is None:
                self.names.add(sequence.name)
                if fnmatch.fnmatchcase(sequence.name, self._requests):
                    self._number[sequence.name] = len(self.sequences)
                    self.sequences.append(sequence)
                else:
                    self._number[sequence.name] = -1
            elif number >= 0 and self.sequences[number].salt != sequence.salt:
                raise CaptureError(
                    f"{file.path} gives sequence {sequence.name!r} another scoring context than a "
                    "pass before it; name the sequences apart and capture again"
                )
        return np.array([self._number[s.name] for s in file.header.sequences], np.int32)

    @property
    def problems(self) -> list[str]:
        """What the scores lack, in sentences."""
        tokens = sum(count for _, count in self._leaks)
        leak = sum(mean * count for mean, count in self._leaks) / max(1, tokens)
        padding = padding_problem(leak)
        return [*self._problems, *([padding] if padding else [])]

    def rows(self) -> Rows:
        """All rows, in the order of the passes."""
        return Rows.concatenate([one.rows for one in self.passes])

    def scored(self) -> tuple[Rows, NDArray[np.float64]]:
        """All tokens that were scored, and their log-probs."""
        return Rows.concatenate(self._scored), np.concatenate(self._logprobs or [np.empty(0)])

    def seen(self) -> Rows:
        """Every token that is known beside the rows and those scored."""
        return Rows.concatenate(self._seen)


def _renumber(rows: Rows, number: NDArray[np.int32]) -> tuple[Rows, NDArray[np.intp]]:
    """Keep the rows of matching sequences; returns them and their places."""
    sequence = number[rows.sequence] if len(rows) else rows.sequence
    kept = np.flatnonzero(sequence >= 0)
    return Rows(sequence[kept], rows.position[kept], rows.token[kept]), kept


def _renumber_shard(shard: ShardScores, number: NDArray[np.int32]) -> ShardScores:
    rows, kept = _renumber(shard.rows, number)
    pending, open_ends = _renumber(shard.pending, number)
    return replace(
        shard,
        rows=rows,
        logit=shard.logit[kept],
        lse=shard.lse[kept],
        padding=shard.padding[kept],
        pending=pending,
        logits=shard.logits[open_ends],
    )


def _same(a: Rows, b: Rows) -> bool:
    return (
        np.array_equal(a.sequence, b.sequence)
        and np.array_equal(a.position, b.position)
        and np.array_equal(a.token, b.token)
    )


def _union(tables: Sequence[Rows]) -> Rows:
    """Merge the ranks' rows of one pass: usually the same rows on every rank."""
    first = tables[0]
    if all(_same(first, table) for table in tables[1:]):
        return first
    merged = Rows.concatenate(tables)
    _, index = np.unique(np.stack([merged.sequence, merged.position]), axis=1, return_index=True)
    return merged.take(np.sort(index))


def _places(table: Rows, at: NDArray[np.intp], rows: Rows) -> NDArray[np.intp]:
    """Where each of ``rows`` lies in a rank's file, given its kept rows and their places there."""
    if _same(table, rows):
        return at
    found = find(table, rows.sequence, rows.position)
    if not len(table):
        return found
    return np.where(found >= 0, at[found], -1)
