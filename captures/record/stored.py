"""The calls of a record's file, each read when it is asked for."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
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


class StoredCalls(Sequence[Call]):
    """The calls of a file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        metadata = self._read_header()
        try:
            self.info = from_text(RecordInfo, metadata[INFO_KEY])
            self._facts = from_text(Facts, metadata[CALLS_KEY]).calls
        except CaptureError as error:
            raise RecordError(f"{path} {error}; collect the scores again") from None
        self.names = tuple(facts.name for facts in self._facts)
        self._prompts = self._bounds("prompt_lengths")
        self._responses = self._bounds("response_lengths")
        self._starts = self._bounds("starts_lengths") if "starts" in self._stored else None

    def _read_header(self) -> dict[str, str]:
        from safetensors import SafetensorError, safe_open

        if self._path.is_dir():
            raise RecordError(f"{self._path} is a directory; name the file of a record")
        try:
            with safe_open(self._path, framework="np") as opened:
                metadata: dict[str, str] = opened.metadata() or {}
            # kept open: a record that is saved again takes the place of this file, and not of
            # what was opened
            self._file = os.open(self._path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            length = int.from_bytes(os.pread(self._file, 8, 0), "little")
            self._stored: dict[str, Any] = json.loads(os.pread(self._file, length, 8))
        except FileNotFoundError:
            raise RecordError(f"there is no record {self._path}; name the file of one") from None
        except (SafetensorError, OSError) as error:
            raise RecordError(
                f"{self._path} is no whole safetensors file ({error}); collect the scores again"
            ) from None
        self._data = 8 + length
        if INFO_KEY not in metadata or CALLS_KEY not in metadata:
            raise RecordError(f"{self._path} is a safetensors file, but no record of scores")
        return metadata

    def _bounds(self, lengths: str) -> NDArray[np.int64]:
        if lengths not in self._stored:
            raise RecordError(f"{self._path} is damaged: it lacks {lengths}")
        found = self._read(lengths, 0, self._stored[lengths]["shape"][0])
        if len(found) != len(self._facts) or (len(found) and found.min() < 0):
            raise RecordError(f"{self._path} is damaged: its {lengths} do not fit its calls")
        return np.concatenate([[0], np.cumsum(found, dtype=np.int64)])

    def _read(self, tensor: str, start: int, stop: int) -> NDArray[Any]:
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
        data = os.pread(self._file, (stop - start) * dtype.itemsize, offset)
        return np.frombuffer(data, dtype)

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        facts = self._facts[number]
        p0, p1 = self._prompts[number : number + 2].tolist()
        r0, r1 = self._responses[number : number + 2].tolist()
        starts = None
        if self._starts is not None:
            starts = self._read("starts", *self._starts[number : number + 2].tolist())
        here = "positions" in self._stored
        return Call.of(
            facts.name,
            self._read("prompt", p0, p1),
            self._read("response", r0, r1),
            {column: self._read(f"scores.{column}", r0, r1) for column in self.info.columns},
            mask=self._read("mask", r0, r1),
            positions=self._read("positions", p0 + r0, p1 + r1) if here else None,
            starts=starts,
            group=facts.group,
            turn=facts.turn,
            cached=facts.cached,
            context=facts.context,
        )

    def __iter__(self) -> Iterator[Call]:
        return (self[index] for index in range(len(self)))
