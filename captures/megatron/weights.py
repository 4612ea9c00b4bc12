"""Load a Megatron model from a checkpoint, save what it holds, and fingerprint it.

Each process reads or writes its own part by the names of checkpoints, and waits for no other.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerbisect.captures.errors import LayerBisectError, ModelDirectoryError
from layerbisect.captures.fingerprint import fingerprint
from layerbisect.captures.megatron.model import unwrap
from layerbisect.captures.megatron.place import Place
from layerbisect.captures.megatron.slots import slots
from layerbisect.captures.weights.format import SnapshotInfo
from layerbisect.captures.weights.snapshot import write_rank

if TYPE_CHECKING:
    from layerbisect.captures.megatron.cuts import Slot
    from layerbisect.captures.megatron.model import Model

_INDEX = "model.safetensors.index.json"
_EMBEDDING = "model.embed_tokens.weight"
_FLOATS = ("BF16", "F16", "F32", "F64")


def load_checkpoint(
    model: Model, directory: str | os.PathLike[str], *, vocab: int | None = None
) -> None:
    """Fill every parameter that this process holds from a Hugging Face checkpoint.

    Values are cast to the parameters' dtypes, and rows that pad the vocabulary become zero. An
    optimizer that holds copies of its own is not told.

    Args:
        model: the job's GPTModel, wrapped or not, or its list of chunks.
        vocab: rows of the vocabulary; those of the checkpoint's embedding by default.

    Raises:
        ModelDirectoryError: the checkpoint lacks a tensor, or holds it in another shape or
            quantised.
        LayerBisectError: a parameter has no tensor in checkpoints, or ``vocab`` is less than 1 or
            more than the model's rows. Nothing is changed by then.
    """
    import torch

    checkpoint = _Checkpoint(Path(directory))
    rows = checkpoint.shape(_EMBEDDING)[0] if vocab is None else vocab
    found, left_out = slots(model, vocab=rows)
    for name, why in left_out.items():
        raise LayerBisectError(
            f"{name} cannot be loaded from {directory}: {why}; give the checkpoint that the model "
            "was configured for, or load it with the trainer's own loader"
        )
    for slot in found:
        checkpoint.check(slot)
    with torch.no_grad():
        for chunk in unwrap(model):
            for name, tensor in chunk.model.named_parameters():
                if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                    tensor.zero_()
        for slot in found:
            checkpoint.fill(slot)


def save_weights(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    label: str = "trainer",
    values: bool = True,
    weight_version: str | None = None,
    vocab: int | None = None,
) -> Path:
    """Write the weights that this process holds into a weight snapshot, and return the directory.

    Every rank of the job calls this with the same directory and all its chunks, and writes its own
    part without waiting. What no checkpoint has is named there with the reason.

    Args:
        vocab: rows of the vocabulary; without it rows that pad it are written as well.

    Raises:
        CaptureError: the directory holds this rank's part already, or another snapshot, or cannot
            be written.
        LayerBisectError: there is no GPTModel in ``model``, or ``vocab`` is less than 1 or more
            than its rows.
    """
    import megatron.core

    first = unwrap(model)[0]
    place = Place.here(first.config)
    found, left_out = slots(model, vocab=vocab)
    info = SnapshotInfo(
        engine="megatron-core",
        engine_version=megatron.core.__version__,
        label=label,
        dtype=str(first.config.params_dtype).removeprefix("torch."),
        world_size=place.world[1],
        values=values,
        weight_version=weight_version,
        tied=bool(first.model.share_embeddings_and_output_weights),
        parallel=place.sizes,
    )
    parts = (slot.part() for slot in found)
    return write_rank(directory, info, place.world[0], parts, left_out=left_out)


def fingerprints(model: Model, *, vocab: int | None = None) -> dict[str, str]:
    """Fingerprint the weights that this process holds whole, by the names of checkpoints.

    Those are the norms and the router in any layout, and without tensor parallelism all.
    """
    found, _ = slots(model, vocab=vocab)
    return {slot.name: fingerprint(slot.values()) for slot in found if slot.whole}


class _Checkpoint:
    """The safetensors files of a directory, of which only the parts asked for are read."""

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.directory = directory
        index = directory / _INDEX
        opened: list[Any] = []
        try:
            paths = sorted(directory.glob("*.safetensors"))
            if index.is_file():
                named = json.loads(index.read_text("utf-8"))["weight_map"]
                paths = [directory / name for name in sorted(set(named.values()))]
            opened += (safe_open(path, framework="pt") for path in paths)
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
            raise ModelDirectoryError(
                f"{directory} is no whole checkpoint ({error}); download or save it again"
            ) from None
        self._slices = {name: file.get_slice(name) for file in opened for name in set(file.keys())}
        if not self._slices:
            raise ModelDirectoryError(
                f"no safetensors file in {directory}; give the directory of a Hugging Face "
                "checkpoint"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; raises ModelDirectoryError where it is not there."""
        return tuple(self._slice(name).get_shape())

    def check(self, slot: Slot) -> None:
        """Raise ModelDirectoryError where a slot's tensor is not there as the model has it."""
        stored = self._slice(slot.name)
        held, wanted = self.shape(slot.name), tuple(total for _, _, total in slot.extents)
        if held != wanted:
            raise ModelDirectoryError(
                f"{slot.name} in {self.directory} has shape {list(held)}, and the model wants "
                f"{list(wanted)}; give the checkpoint that the model was configured for"
            )
        if stored.get_dtype() not in _FLOATS:
            raise ModelDirectoryError(
                f"{slot.name} in {self.directory} is {stored.get_dtype()}, not one of "
                f"{', '.join(_FLOATS)}; give the unquantised checkpoint"
            )

    def fill(self, slot: Slot) -> None:
        """Copy a slot's part into it."""
        stored = self._slice(slot.name)
        slot.fill(stored[tuple(slice(start, stop) for start, stop, _ in slot.extents)])

    def _slice(self, name: str) -> Any:
        if name not in self._slices:
            raise ModelDirectoryError(
                f"{self.directory} holds no tensor {name}, which the model has; give the "
                "checkpoint that the model was configured for"
            )
        return self._slices[name]
