"""Read a weight snapshot: logical tensors, assembled from what the ranks wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import MANIFEST_FILE, from_text
from layerbisect.captures.shards import Piece, assemble
from layerbisect.captures.weights.format import (
    FLOATS,
    SAMPLE,
    TENSORS_FILE,
    WEIGHTS_FILE,
    PartHeader,
    RankWeights,
    SnapshotInfo,
    torch_dtype,
)

if TYPE_CHECKING:
    import torch

_Kind = TypeVar("_Kind", SnapshotInfo, RankWeights)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A rank's part as its manifest describes it."""

    rank: int
    header: PartHeader


@dataclass(frozen=True, slots=True)
class Whole:
    """A logical tensor, and a sentence for each replica that disagrees."""

    values: torch.Tensor
    disagreements: tuple[str, ...]


class WeightSnapshot:
    """A snapshot on disk; open with :meth:`open`. Memory is bounded by one logical tensor."""

    def __init__(
        self, directory: Path, info: SnapshotInfo, ranks: Mapping[int, RankWeights]
    ) -> None:
        self.directory = directory
        self.info = info
        self.ranks = ranks
        self._parts: dict[str, list[StoredPart]] = {}
        for number, rank in sorted(ranks.items()):
            for name, header in rank.tensors.items():
                self._parts.setdefault(name, []).append(StoredPart(number, header))
        self._files: dict[int, Any] = {}

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> WeightSnapshot:
        """Read the descriptions of all ranks, and of no tensor any value.

        Raises CaptureError for a directory that holds no snapshot, or a damaged one. Ranks that
        wrote nothing are among :attr:`problems`.
        """
        folder = Path(directory)
        if not (folder / WEIGHTS_FILE).is_file():
            raise CaptureError(f"no {WEIGHTS_FILE} in {folder}; give a weight snapshot's directory")
        info = _read(SnapshotInfo, folder / WEIGHTS_FILE)
        ranks = {}
        for number in range(info.world_size):
            path = folder / f"rank-{number}" / MANIFEST_FILE
            if path.is_file():
                ranks[number] = _read(RankWeights, path)
                _check(ranks[number], number, path)
        return cls(folder, info, ranks)

    @property
    def problems(self) -> tuple[str, ...]:
        """What keeps the snapshot from being whole, a sentence each."""
        missing = sorted(set(range(self.info.world_size)) - set(self.ranks))
        found = []
        if missing:
            numbers = ", ".join(map(str, missing))
            found.append(
                f"rank {numbers} of {self.info.world_size} wrote nothing into {self.directory}"
            )
        for number, rank in sorted(self.ranks.items()):
            found += [f"rank {number} of {self.directory}: {error}" for error in rank.errors]
        return tuple(found)

    @property
    def left_out(self) -> dict[str, str]:
        """Tensors that a rank held and did not write, and why."""
        return {n: why for rank in self.ranks.values() for n, why in rank.left_out.items()}

    def names(self) -> tuple[str, ...]:
        """Every logical tensor's name, sorted."""
        return tuple(sorted(self._parts))

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def parts(self, name: str) -> tuple[StoredPart, ...]:
        """Say which parts of a tensor which ranks hold."""
        return tuple(self._parts[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the logical tensor."""
        return self._parts[name][0].header.whole

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which the tensor is held."""
        return torch_dtype(self._parts[name][0].header.dtype)

    def tensor(self, name: str) -> Whole:
        """Assemble a logical tensor in its own dtype.

        Raises CaptureError where the parts do not tile it, differ in dtype or shape, a file is
        damaged, or the snapshot holds digests alone.
        """
        if not self.info.values:
            raise CaptureError(f"{self.directory} holds digests alone; save it with values")
        parts = self._parts[name]
        dtypes = {p.header.dtype for p in parts}
        if len(dtypes) > 1:
            raise CaptureError(f"{name}: ranks hold it as {' and as '.join(sorted(dtypes))}")
        if len(parts) == 1 and parts[0].header.shape == parts[0].header.whole:
            return Whole(self._stored(parts[0], name), ())
        try:
            made = assemble([self._piece(part, name) for part in parts], 1)
        except CaptureError as error:
            raise CaptureError(f"{name}: {error}") from None
        return Whole(_torch(made.values[0], dtypes.pop()), made.disagreements)

    def sampled(self, part: StoredPart, name: str) -> torch.Tensor:
        """Return the strided sample of a part, in a snapshot of digests."""
        return self._stored(part, name)

    def _piece(self, part: StoredPart, name: str) -> Piece:
        import torch

        values = self._stored(part, name)
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
        # as bits: numpy lacks some dtypes, and replicas agree when all bits do
        bits = values.contiguous().view(width).numpy()[None]
        return Piece(
            part.header.header(), np.arange(1), bits, part.header.dtype, f"rank {part.rank}"
        )

    def _stored(self, part: StoredPart, name: str) -> torch.Tensor:
        from safetensors import SafetensorError

        path = self.directory / f"rank-{part.rank}" / TENSORS_FILE
        try:
            values: torch.Tensor = self._file(part.rank, path).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CaptureError(f"{path} is damaged ({error}); save the weights again") from None
        expected = part.header.shape if self.info.values else (values.numel(),)
        wanted = torch_dtype(part.header.dtype)
        if tuple(values.shape) != expected or values.itemsize != wanted.itemsize:
            raise CaptureError(
                f"{path} holds {name} as {values.dtype} {list(values.shape)}, and the manifest "
                f"says {part.header.dtype} {list(expected)}; save the weights again"
            )
        return values.view(wanted)

    def _file(self, rank: int, path: Path) -> Any:
        from safetensors import safe_open

        if rank not in self._files:
            self._files[rank] = safe_open(path, framework="pt")
        return self._files[rank]


def strided(part: StoredPart, values: torch.Tensor) -> torch.Tensor:
    """Take from a whole tensor the values that a digest snapshot sampled of ``part``."""
    mine = cut(part, values)
    step = max(1, -(-mine.numel() // SAMPLE))
    return mine.reshape(-1)[::step]


def cut(part: StoredPart, values: torch.Tensor) -> torch.Tensor:
    """Take ``part`` out of a whole tensor."""
    index = tuple(slice(start, stop) for start, stop, _ in part.header.extents)
    return values[index]


def _torch(values: Any, dtype: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values)).view(torch_dtype(dtype))


def _read(kind: type[_Kind], path: Path) -> _Kind:
    try:
        return from_text(kind, path.read_bytes())
    except CaptureError as error:
        raise CaptureError(f"{path} {error}; save the weights again") from None


def _check(rank: RankWeights, number: int, path: Path) -> None:
    if rank.rank != number:
        raise CaptureError(f"{path} is of rank {rank.rank}; the folders were mixed up")
    wrong = {h.dtype for h in rank.tensors.values()} - FLOATS
    if wrong:
        raise CaptureError(f"{path} holds {sorted(wrong)}, which are no dtypes of weights")
