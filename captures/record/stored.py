"""The calls of a record's file, each read when it is asked for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import CaptureError, RecordError
from layerbisect.captures.format import SCHEMA, from_text
from layerbisect.captures.passfile import DTYPES
from layerbisect.captures.record.call import Call, RecordInfo

INFO_KEY = "layerbisect.record"
CALLS_KEY = "layerbisect.calls"
DIGESTS_KEY = "layerbisect.digests"
DIGEST_SIZE = 16
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What a call has beside arrays."""

    name: str
    group: str
    turn: int
    cached: Mapping[str, int] = field(default_factory=dict)
    context: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of every call, in the order of the file."""

    calls: tuple[CallFacts, ...]
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of the stored tensors' bytes, by name (BLAKE2b)."""

    tensors: Mapping[str, str]
    schema: int = SCHEMA


class StoredCalls(Sequence[Call]):
    """The calls of a file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, ...] | None = None
        metadata = self._read_header()
        try:
            self.info = from_text(RecordInfo, metadata[INFO_KEY])
            self._facts = from_text(Facts, metadata[CALLS_KEY]).calls
            digests = from_text(Digests, metadata[DIGESTS_KEY]).tensors
        except CaptureError as error:
            raise RecordError(f"{path} {error}; collect the scores again") from None
        self.names = tuple(facts.name for facts in self._facts)
        with self._opened() as file:
            self._check_digests(file, digests)
            self._prompts = self._bounds(file, "prompt_lengths")
            self._responses = self._bounds(file, "response_lengths")
            starts = "starts" in self._stored
            self._starts = self._bounds(file, "starts_lengths") if starts else None

    def _read_header(self) -> dict[str, str]:
        from safetensors import SafetensorError, safe_open

        if self._path.is_dir():
            raise RecordError(f"{self._path} is a directory; name the file of a record")
        try:
            with safe_open(self._path, framework="np") as opened:
                metadata: dict[str, str] = opened.metadata() or {}
            with self._opened() as file:
                length = int.from_bytes(os.pread(file, 8, 0), "little")
                self._stored: dict[str, Any] = json.loads(os.pread(file, length, 8))
        except FileNotFoundError:
            raise RecordError(f"there is no record {self._path}; name the file of one") from None
        except (SafetensorError, OSError) as error:
            raise RecordError(
                f"{self._path} is no whole safetensors file ({error}); collect the scores again"
            ) from None
        self._data = 8 + length
        if not {INFO_KEY, CALLS_KEY, DIGESTS_KEY} <= metadata.keys():
            raise RecordError(f"{self._path} is a safetensors file, but no record of scores")
        return metadata

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the file; raises RecordError where another one has taken its place."""
        file = os.open(self._path, os.O_RDONLY)
        try:
            stat = os.fstat(file)
            identity = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
            if self._identity not in (None, identity):
                raise RecordError(
                    f"{self._path} was written anew after it was opened; open it again"
                )
            self._identity = identity
            yield file
        finally:
            os.close(file)

    def _check_digests(self, file: int, digests: Mapping[str, str]) -> None:
        for tensor, entry in self._stored.items():
            if tensor == "__metadata__":
                continue
            start, stop = (self._data + offset for offset in entry["data_offsets"])
            found = hashlib.blake2b(digest_size=DIGEST_SIZE)
            for place in range(start, stop, _CHUNK):
                found.update(os.pread(file, min(_CHUNK, stop - place), place))
            if found.hexdigest() != digests.get(tensor):
                raise RecordError(
                    f"{self._path} is damaged: {tensor} is not what was written; collect the "
                    "scores again"
                )

    def _bounds(self, file: int, lengths: str) -> NDArray[np.int64]:
        if lengths not in self._stored:
            raise RecordError(f"{self._path} is damaged: it lacks {lengths}")
        found = self._read(file, lengths, 0, self._stored[lengths]["shape"][0])
        if len(found) != len(self._facts) or (len(found) and found.min() < 0):
            raise RecordError(f"{self._path} is damaged: its {lengths} do not fit its calls")
        return np.concatenate([[0], np.cumsum(found, dtype=np.int64)])

    def _read(self, file: int, tensor: str, start: int, stop: int) -> NDArray[Any]:
        entry = self._stored.get(tensor)
        if entry is None:
            raise RecordError(f"{self._path} is damaged: it lacks {tensor}")
        dtype = DTYPES[entry["dtype"]]
        if entry["shape"] and not 0 <= start <= stop <= entry["shape"][0]:
            raise RecordError(
                f"{self._path} is damaged: {tensor} has {entry['shape'][0]} values and "
                f"{stop} are called for"
            )
        offset = self._data + entry["data_offsets"][0] + start * dtype.itemsize
        return np.frombuffer(os.pread(file, (stop - start) * dtype.itemsize, offset), dtype)

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        facts = self._facts[number]
        p0, p1 = self._prompts[number : number + 2].tolist()
        r0, r1 = self._responses[number : number + 2].tolist()
        with self._opened() as file:
            starts = positions = None
            if self._starts is not None:
                starts = self._read(file, "starts", *self._starts[number : number + 2].tolist())
            if "positions" in self._stored:
                positions = self._read(file, "positions", p0 + r0, p1 + r1)
            return Call.of(
                facts.name,
                self._read(file, "prompt", p0, p1),
                self._read(file, "response", r0, r1),
                {c: self._read(file, f"scores.{c}", r0, r1) for c in self.info.columns},
                mask=self._read(file, "mask", r0, r1),
                positions=positions,
                starts=starts,
                group=facts.group,
                turn=facts.turn,
                cached=facts.cached,
                context=facts.context,
            )

    def __iter__(self) -> Iterator[Call]:
        return (self[index] for index in range(len(self)))
