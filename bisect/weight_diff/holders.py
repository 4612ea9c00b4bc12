"""What a side holds, tensor by tensor in checkpoint names: a checkpoint, or a weight snapshot."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from layerbisect.bisect.checkpoint import Checkpoint
from layerbisect.captures.errors import LayerBisectError, ModelDirectoryError
from layerbisect.captures.weights.format import SCALE, WEIGHTS_FILE, dtype_name
from layerbisect.captures.weights.names import expert_names, plain_name, stacked
from layerbisect.captures.weights.snapshot import block_of
from layerbisect.captures.weights.store import WeightSnapshot


@dataclass(frozen=True, slots=True)
class Held:
    """A logical tensor in the dtype in which it is held.

    ``scale`` [ceil(out / block), ceil(in / block)] belongs to block-scaled values: what counts is
    the product. ``disagreements`` has a sentence for each replica that differs.
    """

    values: torch.Tensor
    scale: torch.Tensor | None = None
    block: tuple[int, int] = (128, 128)
    disagreements: tuple[str, ...] = ()

    def spread(self) -> torch.Tensor:
        """Return the scale of every value, float32 [out, in]; raises LayerBisectError."""
        assert self.scale is not None
        rows, columns = self.values.shape
        grid = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        if tuple(self.scale.shape) != grid:
            raise LayerBisectError(
                f"scales of {list(self.scale.shape)} do not fit {list(self.values.shape)} in "
                f"blocks of {list(self.block)}; give the weight_block_size they were made with"
            )
        wide = self.scale.float().repeat_interleave(self.block[0], 0)[:rows]
        return wide.repeat_interleave(self.block[1], 1)[:, :columns]

    def numbers(self) -> torch.Tensor:
        """Return the values in float32, dequantised."""
        plain = self.values.float()
        return plain if self.scale is None else plain * self.spread()


class Holder(Protocol):
    """One side's weights."""

    label: str
    directory: Path
    version: str | None
    tied: bool | None
    problems: tuple[str, ...]
    left_out: Mapping[str, str]
    snapshot: WeightSnapshot | None
    """What is behind it, where it is a snapshot."""
    main_layers: int | None
    """How many layers there are before those that predict further tokens, where it has such."""

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> tuple[str, ...]:
        """Every logical tensor, without scales of blocks."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""

    def itemsize(self, name: str) -> int:
        """Bytes of one value."""

    def get(self, name: str) -> Held:
        """Read a tensor; raises LayerBisectError where it cannot be."""


def open_holder(directory: str | os.PathLike[str], label: str) -> Holder:
    """Open a checkpoint directory or a weight snapshot; ``label`` is for what has none of its own.

    Raises LayerBisectError for a directory that is neither.
    """
    folder = Path(directory)
    if (folder / WEIGHTS_FILE).is_file():
        return SnapshotHolder(WeightSnapshot.open(folder))
    if not folder.is_dir():
        raise ModelDirectoryError(
            f"{folder} is no directory; give that of a checkpoint or of a weight snapshot"
        )
    within = sorted(path.parent for path in folder.glob(f"*/{WEIGHTS_FILE}"))
    if within and not any(folder.glob("*.safetensors")):
        numbers = f"{within[0].name} to {within[-1].name}" if len(within) > 1 else within[0].name
        raise ModelDirectoryError(
            f"{folder} holds {len(within)} weight snapshot{'s' if len(within) > 1 else ''} "
            f"({numbers}); name one, such as {within[-1]}"
        )
    return CheckpointHolder(folder, label)


class SnapshotHolder:
    """The weights of a snapshot."""

    def __init__(self, snapshot: WeightSnapshot) -> None:
        self.snapshot: WeightSnapshot | None = snapshot
        self._held = snapshot
        self.label = snapshot.info.label
        self.directory = snapshot.directory
        self.version = snapshot.info.weight_version
        self.tied = snapshot.info.tied
        self.main_layers: int | None = None
        self.problems = snapshot.problems
        self.left_out: Mapping[str, str] = snapshot.left_out
        self._block = snapshot.info.block or (128, 128)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def names(self) -> tuple[str, ...]:
        """Every logical tensor, without scales of blocks."""
        return _without_scales(self._held.names())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._held.shape(name)

    def itemsize(self, name: str) -> int:
        """Bytes of one value."""
        return self._held.dtype(name).itemsize

    def get(self, name: str) -> Held:
        """Read a tensor; raises CaptureError where it cannot be."""
        whole = self._held.tensor(name)
        scale = None
        if name + SCALE in self._held:
            scale = self._held.tensor(name + SCALE).values
        return Held(whole.values, scale, self._block, whole.disagreements)


class CheckpointHolder:
    """The weights of a Hugging Face checkpoint; stacked experts are read one by one."""

    def __init__(self, directory: Path, label: str) -> None:
        self.label = label
        self.directory = directory
        self.version: str | None = None
        self.problems: tuple[str, ...] = ()
        self.snapshot: WeightSnapshot | None = None
        self._checkpoint = Checkpoint(directory)
        config = _config(directory)
        self.tied: bool | None = config.get("tie_word_embeddings")
        self._block = block_of(config.get("quantization_config")) or (128, 128)
        ahead = config.get("num_nextn_predict_layers")
        self.main_layers: int | None = config.get("num_hidden_layers") if ahead else None
        left_out: dict[str, str] = {}
        # the stored tensor, and for a stack's matrix which expert and which part
        self._homes: dict[str, tuple[str, int | None, int, int]] = {}
        for stored in self._checkpoint.names():
            tensor = self._checkpoint.tensor(stored)
            name = plain_name(stored)
            kinds = stacked(name, tuple(tensor.shape), config.get("hidden_size"))
            if dtype_name(tensor) is None:
                left_out[name] = f"{tensor.dtype} is no dtype of weights"
            elif not kinds:
                self._homes[name] = (stored, None, 0, 1)
            else:
                for expert in range(len(tensor)):
                    for part, each in enumerate(expert_names(name, expert, kinds)):
                        self._homes[each] = (stored, expert, part, len(kinds))
        self.left_out: Mapping[str, str] = left_out

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    def names(self) -> tuple[str, ...]:
        """Every logical tensor, without scales of blocks."""
        return _without_scales(tuple(sorted(self._homes)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._tensor(name).shape)

    def itemsize(self, name: str) -> int:
        """Bytes of one value."""
        return self._tensor(name).itemsize

    def get(self, name: str) -> Held:
        """Read a tensor."""
        scale = self._tensor(name + SCALE) if name + SCALE in self._homes else None
        return Held(self._tensor(name), scale, self._block)

    def _tensor(self, name: str) -> torch.Tensor:
        stored, expert, part, parts = self._homes[name]
        tensor = self._checkpoint.tensor(stored)
        return tensor if expert is None else tensor[expert].chunk(parts)[part]


def _without_scales(names: tuple[str, ...]) -> tuple[str, ...]:
    held = set(names)
    return tuple(n for n in names if not (n.endswith(SCALE) and n.removesuffix(SCALE) in held))


def _config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"cannot read {path} ({error}); save it again") from None
    return found if isinstance(found, dict) else {}
