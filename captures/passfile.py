"""Read one pass file mapped, with numpy alone.

safetensors' own numpy reader has no bfloat16, so the header (8 bytes of length, then JSON) is read
here and each tensor is mapped: see https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import (
    HEADER_KEY,
    TENSORS_KEY,
    PassHeader,
    PassTensors,
    TensorHeader,
    from_json,
    from_text,
)
from layerbisect.captures.rows import Rows
from layerbisect.captures.vocab_scores import ShardScores

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""numpy dtype of each dtype that a pass may hold, by safetensors' name for it."""

_METADATA = '{"__metadata__":'


@dataclass(frozen=True, slots=True)
class _Stored:
    """A stored tensor; ``start`` counts bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class PassFile:
    """One rank's forward pass; raises CaptureError when the file is truncated or is not one.

    ``rows`` are the pass's rows, ``context`` tokens known though not computed in it, ``scored`` the
    tokens whose log-probs ``logprob`` (float64 [scored], nat) holds, or ``shard`` this rank's part
    of them where it holds a part of the vocabulary; ``size`` is in bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = path.stat().st_size
                metadata, layout = self._read_header(file)
                self.header = from_json(PassHeader, metadata[HEADER_KEY], path)
                self.rows = self._table(file, "rows")
                self.context = self._table(file, "context")
                self.scored = self._table(file, "scores")
                self.logprob = np.empty(0)
                self.shard: ShardScores | None = None
                if self.header.vocab is not None:
                    self.shard = self._shard(file, self.header.vocab)
                    self.scored = Rows.empty()
                elif len(self.scored):
                    self.logprob = self._column(file, "scores.logprob", "f", len(self.scored))
        except OSError as error:
            raise CaptureError(f"cannot read {path}: {error.strerror}; capture again") from None
        try:
            self.tensors = _tensors(metadata[TENSORS_KEY], layout, len(self.rows))
        except CaptureError as error:
            raise CaptureError(f"{path} {error}; capture again") from None

    def _read_header(self, file: BinaryIO) -> tuple[dict[str, Any], str]:
        length = int.from_bytes(file.read(8), "little")
        if self.size < 8 or length > self.size - 8:
            raise self._damaged(f"it ends before its header does (truncated at {self.size} bytes)")
        try:
            metadata, layout = _split(file.read(length).decode())
            self._stored = _layout(layout)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header is no safetensors header ({error})") from None
        for key in (HEADER_KEY, TENSORS_KEY):
            if not isinstance(metadata.get(key), str):
                raise CaptureError(
                    f"{self.path} is a safetensors file but no pass of a capture (no {key!r} in "
                    "its metadata); remove it, or capture again"
                )
        self._data = 8 + length
        end = self._data + max((s.stop for s in self._stored.values()), default=0)
        if self.size != end:
            raise self._damaged(f"it has {self.size} bytes and its header describes {end}")
        return metadata, layout

    def _table(self, file: BinaryIO, group: str) -> Rows:
        """Read a (sequence, position, token) table; none is an empty one."""
        if f"{group}.sequence" not in self._stored:
            return Rows.empty()
        size = math.prod(self._stored[f"{group}.sequence"].shape)
        columns = [
            self._column(file, f"{group}.{c}", "i", size) for c in ("sequence", "position", "token")
        ]
        try:
            rows = Rows.of(*columns)
        except CaptureError as error:
            raise self._damaged(f"in its {group}, {error}") from None
        if len(rows) and rows.sequence.max() >= len(self.header.sequences):
            raise self._damaged(f"its {group} name a sequence that it does not list")
        return rows

    def _shard(self, file: BinaryIO, vocab: tuple[int, int, int]) -> ShardScores:
        pending = self._table(file, "pending")
        count = len(self.scored)
        logit, lse, padding = (
            self._column(file, f"scores.{c}", "f", count) if count else np.empty(0)
            for c in ("logit", "lse", "padding")
        )
        logits: NDArray[Any] = np.empty((0, vocab[1] - vocab[0]), np.float32)
        if len(pending):
            stored = self._stored.get("pending.logits")
            if stored is None or stored.shape != (len(pending), vocab[1] - vocab[0]):
                raise self._damaged("its pending rows have no logits of their vocabulary")
            logits = self.read("pending.logits")
        return ShardScores(vocab, self.scored, logit, lse, padding, pending, logits)

    def _column(self, file: BinaryIO, name: str, kind: str, size: int) -> NDArray[Any]:
        stored = self._stored.get(name)
        if stored is None:
            raise self._damaged(f"it lacks {name}")
        dtype = DTYPES[stored.dtype]
        if stored.shape != (size,) or dtype.kind != kind:
            raise self._damaged(f"{name} is {stored.dtype} of shape {list(stored.shape)}")
        file.seek(self._data + stored.start)
        return np.frombuffer(file.read(stored.stop - stored.start), dtype)

    def _damaged(self, why: str) -> CaptureError:
        return CaptureError(f"{self.path} is damaged: {why}; capture again")

    def dtype(self, name: str) -> str:
        """Name, in safetensors' words, of a stored tensor's dtype."""
        return self._stored[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor."""
        return self._stored[name].shape

    def bytes_of(self, name: str) -> int:
        """How many bytes of the file a stored tensor takes."""
        return self._stored[name].stop - self._stored[name].start

    def read(self, name: str, index: NDArray[np.intp] | None = None) -> NDArray[Any]:
        """Read a tensor, or some of its rows; float16 and bfloat16 come as float32, exactly."""
        stored = self._stored[name]
        dtype = DTYPES[stored.dtype]
        if 0 in stored.shape:
            values: NDArray[Any] = np.empty(stored.shape, dtype)
        else:
            try:
                with self.path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                values = np.frombuffer(
                    mapped, dtype, math.prod(stored.shape), self._data + stored.start
                ).reshape(stored.shape)
            except (OSError, ValueError) as error:
                raise CaptureError(
                    f"cannot read {name} of {self.path}: {error}; was the capture deleted or "
                    "overwritten while it was read?"
                ) from None
        picked = np.array(values) if index is None else np.asarray(values[index])
        if stored.dtype == "BF16":
            bits = picked.astype(np.uint32)
            bits <<= 16
            return bits.view(np.float32)
        if stored.dtype == "F16":
            return picked.astype(np.float32)
        return picked


# thousands of decode passes differ in little but their rows: each text is parsed once


@lru_cache(maxsize=256)
def _tensors(text: str, layout: str, rows: int) -> Mapping[str, TensorHeader]:
    """Parse PassTensors and check them against what a file of so many rows stores."""
    tensors, stored = from_text(PassTensors, text).tensors, _layout(layout)
    for name, tensor in tensors.items():
        if name not in stored:
            raise CaptureError(f"is damaged: it lists {name} and does not hold it")
        try:
            tensor.check(stored[name].shape, rows)
        except CaptureError as error:
            raise CaptureError(f"is damaged: {name}: {error}") from None
    return tensors


def _split(text: str) -> tuple[dict[str, Any], str]:
    """Cut a header into its metadata, which safetensors writes first, and the text of the rest."""
    if not text.startswith(_METADATA):
        return {}, text
    metadata, end = json.JSONDecoder().raw_decode(text, len(_METADATA))
    if not isinstance(metadata, dict):
        raise ValueError(f"its metadata are {metadata!r:.40}")
    return metadata, "{" + text[end:].lstrip(" ,").rstrip(" ")


@lru_cache(maxsize=256)
def _layout(text: str) -> Mapping[str, _Stored]:
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("not an object")
    return {name: _entry(name, value) for name, value in raw.items() if name != "__metadata__"}


def _entry(name: str, value: Any) -> _Stored:
    try:
        dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        width = DTYPES[dtype].itemsize
        whole = all(type(n) is int and n >= 0 for n in (start, stop, *shape))
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"it describes {name!r} as {value!r:.80}") from None
    if not whole or stop - start != width * math.prod(shape):
        raise ValueError(f"{name!r} has {list(shape)} values in bytes {start} to {stop}")
    return _Stored(dtype, shape, start, stop)
