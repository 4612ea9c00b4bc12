"""A weight snapshot on disk, schema 1: what one process group holds, by checkpoint names.

::

    weights.json                SnapshotInfo: engine, label, weight version, parallel layout
    rank-0/manifest.json        RankWeights: each tensor's part, its digest; what was left out
    rank-0/weights.safetensors  the parts, or of each a strided sample
    rank-1/...

A rank's manifest is written last, so a rank that has one is finished, and a snapshot is finished
when every rank of ``world_size`` has one without errors. No rank waits for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import SCHEMA, TensorHeader

if TYPE_CHECKING:
    import torch

WEIGHTS_FILE = "weights.json"
TENSORS_FILE = "weights.safetensors"
SAMPLE = 4096
"""At most so many values of a part are kept where a snapshot holds digests alone."""
SCALE = "_scale_inv"
"""What is appended to a block-scaled weight's name to name its scales."""

Extent = tuple[int, int, int]
"""``[start, stop, total]`` of one dimension, in logical units."""


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """What is the same in all ranks of a snapshot.

    ``values`` is False where only digests and samples are kept. ``block`` is the shape of the
    blocks that share a scale, for block-scaled weights. ``tied`` says whether the model's
    configuration ties the head to the embedding, where it says anything.
    """

    engine: str
    engine_version: str
    label: str
    dtype: str
    world_size: int
    values: bool
    weight_version: str | None = None
    tied: bool | None = None
    block: tuple[int, int] | None = None
    parallel: Mapping[str, int] = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise CaptureError(f"world_size is {self.world_size}: it must be 1 or more")


@dataclass(frozen=True, slots=True)
class PartHeader:
    """One rank's part of a logical tensor: ``dtype`` is safetensors' name, ``digest`` of all bytes.

    Raises CaptureError for an extent that does not lie within its total.
    """

    dtype: str
    extents: tuple[Extent, ...]
    digest: str

    def __post_init__(self) -> None:
        for start, stop, total in self.extents:
            if not 0 <= start <= stop <= total:
                raise CaptureError(f"the part [{start}, {stop}) is not within a total of {total}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(stop - start for start, stop, _ in self.extents)

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the logical tensor."""
        return tuple(total for _, _, total in self.extents)

    def header(self) -> TensorHeader:
        """Describe the part as one row of a point, for the assembly of shards."""
        names = tuple(f"d{i}" for i in range(len(self.extents)))
        cut = {n: e for n, e in zip(names, self.extents, strict=True) if e[1] - e[0] != e[2]}
        return TensorHeader(("row", *names), shards=cut)


@dataclass(frozen=True, slots=True)
class RankWeights:
    """What one rank wrote; ``left_out`` says of a tensor that it holds why it is not here."""

    rank: int
    tensors: Mapping[str, PartHeader] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of any device and layout, or a view of one, and which part of ``name`` it is."""

    name: str
    values: torch.Tensor
    extents: tuple[Extent, ...]

    def __post_init__(self) -> None:
        held = [stop - start for start, stop, _ in self.extents]
        if held != [int(n) for n in self.values.shape]:
            raise CaptureError(
                f"{self.name} of {list(self.values.shape)} is not the part {list(self.extents)}"
            )

    @classmethod
    def of(
        cls, name: str, values: torch.Tensor, shards: Mapping[int, Extent] | None = None
    ) -> Part:
        """Describe a part that is whole in every dimension but those of ``shards``."""
        cut = dict(shards or {})
        sizes = enumerate(int(n) for n in values.shape)
        return cls(name, values, tuple(cut.get(dim, (0, n, n)) for dim, n in sizes))


_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
FLOATS = frozenset(_DTYPES.values())
"""Dtypes of weights, by safetensors' names."""


def dtype_name(values: torch.Tensor) -> str | None:
    """Safetensors' name for a weight's dtype; None for a tensor that is none of floats."""
    return _DTYPES.get(str(values.dtype).removeprefix("torch."))


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that ``dtype_name`` named."""
    import torch

    found: torch.dtype = getattr(torch, next(k for k, v in _DTYPES.items() if v == name))
    return found


def raw(values: torch.Tensor) -> torch.Tensor:
    """Copy to the CPU as uint8 [..., bytes of a value]; one tensor's memory at most."""
    import torch

    flat = values.detach().to("cpu").contiguous()
    return flat.unsqueeze(-1).view(torch.uint8)


def digest(values: torch.Tensor) -> str:
    """Digest dtype, shape and all bytes, as 32 hex digits."""
    head = f"{dtype_name(values)} {[int(n) for n in values.shape]} ".encode()
    made = hashlib.blake2b(head, digest_size=16)
    made.update(raw(values).numpy().data if values.numel() else b"")
    return made.hexdigest()


def sample(values: torch.Tensor) -> torch.Tensor:
    """Return at most ``SAMPLE`` evenly strided values of the flattened tensor, [k]."""
    step = max(1, -(-values.numel() // SAMPLE))
    return values.detach().reshape(-1)[::step]
