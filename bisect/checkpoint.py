"""A checkpoint directory's safetensors files, mapped: opening reads headers, use reads pages."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from layerbisect.captures.errors import ModelDirectoryError

INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")
FLOAT_TYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class Checkpoint:
    """The tensors of one directory by name, whatever files hold them."""

    def __init__(self, directory: str | Path) -> None:
        """Open every file's header.

        Raises ModelDirectoryError when there is no safetensors file, the index names a file that
        isn't there, one of files that are numbered is missing, or a file is truncated.
        """
        self.directory = Path(directory)
        self._file_of: dict[str, Any] = {}
        index = self.directory / INDEX
        if index.is_file():
            self._open_indexed(index)
            return
        paths = sorted(self.directory.glob("*.safetensors"))
        if not paths:
            raise ModelDirectoryError(
                f"no safetensors file in {directory}; give the directory of a Hugging Face "
                "checkpoint, saved with safe serialization"
            )
        _check_numbers(paths)
        for path in paths:
            opened = _open(path)
            self._file_of.update(dict.fromkeys(opened.keys(), opened))

    def _open_indexed(self, index: Path) -> None:
        try:
            weight_map = {
                str(tensor): str(name)
                for tensor, name in json.loads(index.read_text("utf-8"))["weight_map"].items()
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelDirectoryError(f"cannot read {index} ({error!r}); save it again") from None
        files = {name: _open(self.directory / name) for name in sorted(set(weight_map.values()))}
        held = {name: set(opened.keys()) for name, opened in files.items()}
        for tensor, name in weight_map.items():
            if tensor not in held[name]:
                raise ModelDirectoryError(
                    f"{index} says that {name} holds {tensor}, and it doesn't; save it again"
                )
            self._file_of[tensor] = files[name]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted."""
        return tuple(sorted(self._file_of))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in its stored dtype, mapped from the file; don't write to it.

        Raises ModelDirectoryError for a name that the checkpoint doesn't hold.
        """
        tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor that ``check`` has accepted."""
        return FLOAT_TYPES[self._file(name).get_slice(name).get_dtype()]

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelDirectoryError unless every named tensor is there with its shape.

        Quantised and integer tensors are refused too. Reads headers only.
        """
        for name, expected in shapes.items():
            header = self._file(name).get_slice(name)
            received = tuple(header.get_shape())
            if received != expected:
                raise ModelDirectoryError(
                    f"{name} in {self.directory} has shape {list(received)}, but config.json "
                    f"expects {list(expected)}; the files belong to different models"
                )
            if header.get_dtype() not in FLOAT_TYPES:
                raise ModelDirectoryError(
                    f"{name} in {self.directory} is {header.get_dtype()}, not one of "
                    f"{', '.join(FLOAT_TYPES)}; give the unquantised checkpoint"
                )

    def _file(self, name: str) -> Any:
        try:
            return self._file_of[name]
        except KeyError:
            raise ModelDirectoryError(
                f"{self.directory} holds no tensor {name}; the checkpoint is incomplete or does "
                "not belong to its config.json"
            ) from None


class TensorCache:
    """The tensors used last, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: OrderedDict[Hashable, torch.Tensor] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor under ``key``, made when it isn't held."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        made = make()
        if made.nbytes > self.max_bytes:
            return made
        self._held[key] = made
        self._bytes += made.nbytes
        while self._bytes > self.max_bytes:
            self._bytes -= self._held.popitem(last=False)[1].nbytes
        return made


def _check_numbers(paths: Sequence[Path]) -> None:
    """Raise ModelDirectoryError where files say that they are more than there are."""
    found = [match for path in paths if (match := _NUMBERED.fullmatch(path.name))]
    for stem, total in sorted({(match["stem"], match["total"]) for match in found}):
        held = {int(m["number"]) for m in found if (m["stem"], m["total"]) == (stem, total)}
        lacking = sorted(set(range(1, int(total) + 1)) - held)
        if lacking:
            raise ModelDirectoryError(
                f"{paths[0].parent} holds {len(held)} of {int(total)} files called "
                f"{stem}-*-of-{total}.safetensors; number {lacking[0]} is missing, so download or "
                "save them again"
            )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelDirectoryError(
            f"{path} is missing, though the index names it; download or save it again"
        ) from None
    except (SafetensorError, OSError) as error:
        raise ModelDirectoryError(
            f"{path} is not a whole safetensors file ({error}); download or save it again"
        ) from None
