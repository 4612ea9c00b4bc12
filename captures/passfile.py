"""Read one pass file mapped, with numpy alone.

safetensors' own numpy reader has no bfloat16, so the header (8 bytes of length, then JSON) is read
here and each tensor is mapped: see https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import HEADER_KEY, PassHeader, from_json
from layerbisect.captures.rows import Rows

_DTYPES: dict[str, np.dtype[Any]] = {
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


@dataclass(frozen=True, slots=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]
    offset: int


class PassFile:
    """One rank's forward pass; raises CaptureError when the file is truncated or is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        entries, metadata = self._read_header()
        if HEADER_KEY not in metadata:
            raise CaptureError(f"{path} is a safetensors file, but no pass of a capture")
        self.header = from_json(PassHeader, metadata[HEADER_KEY], path)
        self._stored = entries
        self.rows = self.table("rows")
        for name, tensor in self.header.tensors.items():
            if name not in entries:
                raise CaptureError(f"{path} lists {name} and does not hold it")
            shape = entries[name].shape
            if len(shape) != len(tensor.dims) or shape[0] != len(self.rows):
                raise CaptureError(
                    f"{path}: {name} has shape {list(shape)}, which does not fit "
                    f"{list(tensor.dims)} with {len(self.rows)} rows"
                )
            for dim, (start, stop, _) in tensor.shards.items():
                if dim not in tensor.dims or shape[tensor.dims.index(dim)] != stop - start:
                    raise CaptureError(
                        f"{path}: {name} has shape {list(shape)}, which does not fit its shard "
                        f"{dim}=[{start}, {stop})"
                    )

    def _read_header(self) -> tuple[dict[str, _Stored], dict[str, str]]:
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > size - 8:
                    raise self._damaged("it ends before its header does")
                raw = json.loads(file.read(length))
        except OSError as error:
            raise CaptureError(f"cannot read {self.path}: {error.strerror}") from None
        except ValueError as error:
            if isinstance(error, CaptureError):
                raise
            raise self._damaged("its header is not JSON") from None
        if not isinstance(raw, dict):
            raise self._damaged("its header is not an object")
        metadata = raw.pop("__metadata__", {})
        entries = {name: self._entry(name, value, 8 + length, size) for name, value in raw.items()}
        return entries, metadata

    def _entry(self, name: str, value: Any, data: int, size: int) -> _Stored:
        try:
            dtype, shape = value["dtype"], tuple(int(n) for n in value["shape"])
            start, stop = (int(n) for n in value["data_offsets"])
            width = _DTYPES[dtype].itemsize
        except (KeyError, TypeError, ValueError):
            raise self._damaged(f"it describes {name!r} as {value!r:.80}") from None
        if min((start, *shape), default=0) < 0 or stop - start != width * int(np.prod(shape)):
            raise self._damaged(f"{name!r} has {stop - start} bytes for shape {list(shape)}")
        if data + stop > size:
            raise self._damaged(f"it ends before {name!r} does (truncated at {size} bytes)")
        return _Stored(dtype, shape, data + start)

    def _damaged(self, why: str) -> CaptureError:
        return CaptureError(f"{self.path} is damaged: {why}; capture again, or delete this pass")

    def table(self, group: str) -> Rows:
        """Read the (sequence, position, token) table ``rows``, ``context`` or ``scores``."""
        if f"{group}.sequence" not in self._stored:
            return Rows.empty()
        try:
            columns = [self.read(f"{group}.{c}") for c in ("sequence", "position", "token")]
        except KeyError as error:
            raise self._damaged(f"it lacks {error}") from None
        rows = Rows.of(*columns)
        if len(rows) and rows.sequence.max() >= len(self.header.sequences):
            raise self._damaged(f"its {group} name a sequence that it does not list")
        return rows

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def dtype(self, name: str) -> str:
        """Name, in safetensors' words, of a stored tensor's dtype."""
        return self._stored[name].dtype

    def read(self, name: str, index: NDArray[np.intp] | None = None) -> NDArray[Any]:
        """Read a tensor, or some of its rows; float16 and bfloat16 come as float32, exactly."""
        stored = self._stored[name]
        shape = stored.shape
        if 0 in shape:
            values: NDArray[Any] = np.empty(shape, _DTYPES[stored.dtype])
        else:
            values = np.memmap(
                self.path, _DTYPES[stored.dtype], mode="r", offset=stored.offset, shape=shape
            )
        picked = np.array(values if index is None else values[index])
        if stored.dtype == "BF16":
            return (picked.astype(np.uint32) << 16).view(np.float32)
        if stored.dtype == "F16":
            return picked.astype(np.float32)
        return picked
