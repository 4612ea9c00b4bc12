"""A record of scores on disk: one safetensors file with its metadata as JSON.

The file holds its calls laid end to end: ``prompt``, ``response``, ``mask``, one tensor a column,
``positions`` and ``starts`` where they are not the ordinary ones, and the lengths. A column is
float32 where that loses nothing, else float64. Reading takes one call at a time, so memory is
bounded by a call and not by the file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import RecordError
from layerbisect.captures.format import to_json
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.stored import (
    CALLS_KEY,
    DIGEST_SIZE,
    DIGESTS_KEY,
    INFO_KEY,
    CallFacts,
    Digests,
    Facts,
    StoredCalls,
)


class ScoreRecord(Sequence[Call]):
    """Calls that were scored by the same columns; in memory, or read from a file one by one.

    ``info`` says how each column was obtained. Build from calls, or with :meth:`open`.
    """

    def __init__(self, info: RecordInfo, calls: Sequence[Call], path: Path | None = None) -> None:
        """Take calls that all have the columns of ``info``, in any order; raises RecordError."""
        self.info = info
        self.path = path
        self._calls = calls
        if path is None:
            _check_whole(self)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ScoreRecord:
        """Open a record's file; every call is read once and checked.

        Raises RecordError: no file there, a damaged one, another kind of file, or a call that says
        what cannot be.
        """
        stored = StoredCalls(Path(path))
        record = cls(stored.info, stored, Path(path))
        _check_whole(record)
        return record

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: Any) -> Any:
        """One call, or some in memory."""
        return self._calls[index]

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self.info.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the calls."""
        return (
            self._calls.names
            if isinstance(self._calls, StoredCalls)
            else tuple(call.name for call in self._calls)
        )

    def with_column(
        self,
        column: str,
        scores: Mapping[str, Any],
        scoring: Scoring,
        *,
        cached: Mapping[str, int] | None = None,
    ) -> ScoreRecord:
        """Return the record with one column more.

        Args:
            column: its name; one that is there is never replaced.
            scores: for each call, by name, float [response].
            scoring: how it was obtained.
            cached: prompt tokens that came from the prefix cache, by call.

        Raises:
            RecordError: the column is there, a call lacks its scores, or they cannot be.
        """
        if column in self.info.columns:
            raise RecordError(
                f"the record has a column {column} already, and scores are never overwritten; "
                "name another one"
            )
        lacking = [name for name in self.names if name not in scores]
        if lacking:
            raise RecordError(f"{column} has no scores for call {lacking[0]!r}")
        calls = [
            Call.of(
                call.name,
                call.prompt,
                call.response,
                {**call.scores, column: scores[call.name]},
                mask=call.mask,
                positions=call.positions,
                starts=call.starts,
                group=call.group,
                turn=call.turn,
                cached={**call.cached, **({column: cached[call.name]} if cached else {})},
                context=call.context,
            )
            for call in self
        ]
        columns = {**self.info.columns, column: scoring}
        return ScoreRecord(replace(self.info, columns=columns), calls)

    def without(self, *columns: str) -> ScoreRecord:
        """Return the record, in memory, without some of its columns."""
        kept = {c: s for c, s in self.info.columns.items() if c not in columns}
        calls = [
            replace(
                call,
                scores={c: call.scores[c] for c in kept},
                cached={c: n for c, n in call.cached.items() if c in kept},
            )
            for call in self
        ]
        return ScoreRecord(replace(self.info, columns=kept), calls)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the record, whole or not at all.

        A file that is there may only gain columns: its calls and its columns must be in this record
        to the bit.

        Raises:
            RecordError: the file there is no record, or holds what this one would change.
        """
        target = Path(path)
        if target.exists():
            _check_keeps(ScoreRecord.open(target), self, target)
        tensors, metadata = _tensors(self)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        from safetensors.numpy import save

        kept = "; what it held is kept" if target.exists() else ""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # the library's own writer lets nobody but the owner read the file
            temporary.write_bytes(save(tensors, metadata))
            os.replace(temporary, target)
        except OSError as error:
            why = error.strerror or str(error)
            raise RecordError(f"cannot write {target}: {why}{kept}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return target


def _check_whole(record: ScoreRecord) -> None:
    here = str(record.path or "the record")
    if not len(record):
        raise RecordError(f"{here} holds no call")
    seen: set[str] = set()
    for call in record:
        if call.name in seen:
            raise RecordError(f"{here} has two calls named {call.name!r}")
        seen.add(call.name)
        if call.scores.keys() != record.info.columns.keys():
            differing = sorted(call.scores.keys() ^ record.info.columns.keys())
            raise RecordError(
                f"{here}: call {call.name!r} and the record differ in column {differing[0]}"
            )


def _check_keeps(old: ScoreRecord, new: ScoreRecord, path: Path) -> None:
    advice = "scores are never overwritten: name another file"
    if old.names != new.names:
        raise RecordError(f"{path} holds other calls; {advice}")
    for before, after in zip(old, new, strict=True):
        here = f"call {before.name!r} of {path}"
        same = all(
            np.array_equal(getattr(before, part), getattr(after, part))
            for part in ("prompt", "response", "mask", "positions", "starts")
        )
        if not same:
            raise RecordError(f"{here} has other tokens; {advice}")
        for column, values in before.scores.items():
            if column not in after.scores:
                raise RecordError(f"{here} has a column {column} that this record lacks; {advice}")
            if not np.array_equal(values, after.scores[column], equal_nan=True):
                raise RecordError(f"{here} has other scores in {column}; {advice}")


def _tensors(record: ScoreRecord) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    calls = list(record)
    tensors: dict[str, NDArray[Any]] = {
        "prompt_lengths": np.array([len(c.prompt) for c in calls], np.int64),
        "response_lengths": np.array([len(c.response) for c in calls], np.int64),
        "prompt": _narrow([c.prompt for c in calls]),
        "response": _narrow([c.response for c in calls]),
        "mask": np.concatenate([c.mask for c in calls]).astype(np.uint8),
    }
    if any((c.positions != np.arange(len(c.positions))).any() for c in calls):
        tensors["positions"] = _narrow([c.positions for c in calls])
    if any(len(c.starts) > 1 for c in calls):
        tensors["starts_lengths"] = np.array([len(c.starts) for c in calls], np.int64)
        tensors["starts"] = np.concatenate([c.starts for c in calls])
    for column in record.columns:
        values = np.concatenate([c.scores[column] for c in calls])
        narrow = values.astype(np.float32)
        exact = np.array_equal(narrow.astype(np.float64), values, equal_nan=True)
        tensors[f"scores.{column}"] = narrow if exact else values
    facts = tuple(CallFacts(c.name, c.group, c.turn, c.cached, c.context) for c in calls)
    digests = Digests(
        {
            name: hashlib.blake2b(np.ascontiguousarray(t).data, digest_size=DIGEST_SIZE).hexdigest()
            for name, t in tensors.items()
        }
    )
    return tensors, {
        INFO_KEY: to_json(record.info),
        CALLS_KEY: to_json(Facts(facts)),
        DIGESTS_KEY: to_json(digests),
    }


def _narrow(parts: Sequence[NDArray[np.int64]]) -> NDArray[Any]:
    """Lay tokens or positions end to end, as int32 where they fit."""
    whole = np.concatenate(parts)
    return whole.astype(np.int32) if whole.max() < 2**31 else whole


def open_all(paths: Iterable[str | os.PathLike[str]]) -> list[ScoreRecord]:
    """Open several records; directories stand for the records in them, in order of their names.

    Raises RecordError for none.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise RecordError("there is no record; name a file, or a directory with some")
    return [ScoreRecord.open(file) for file in files]
