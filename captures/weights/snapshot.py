"""Write what a process holds as a weight snapshot: of a live module, or part by part."""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import MANIFEST_FILE
from layerbisect.captures.megatron.model import is_megatron
from layerbisect.captures.tensorfile import write_tensors
from layerbisect.captures.weights.format import (
    SCALE,
    TENSORS_FILE,
    WEIGHTS_FILE,
    Extent,
    Part,
    PartHeader,
    RankWeights,
    SnapshotInfo,
    digest,
    dtype_name,
    sample,
)
from layerbisect.captures.weights.names import logical_parts, plain_name

if TYPE_CHECKING:
    import torch


def save_weights(
    module: torch.nn.Module | Sequence[torch.nn.Module],
    directory: str | os.PathLike[str],
    *,
    label: str = "trainer",
    values: bool = True,
    weight_version: str | None = None,
    vocab: int | None = None,
) -> Path:
    """Write the weights that a live module holds, and return the directory.

    Parameters keep their names, without the wrappers of data parallelism and compilation; a layer's
    stacked experts are written as one matrix an expert, as a checkpoint has them. In a distributed
    job every rank calls this with the same directory and writes its own part, without waiting:
    sharded (DTensor) parameters as shards, others as replicas. Of a Megatron job all chunks of a
    rank are given, and each rank's part of what a checkpoint holds is written by its names.

    Args:
        module: the model; of a Megatron job the list of its chunks, or one of them.
        values: False keeps a digest of every tensor and a sample of its values, and no more.
        vocab: rows of a Megatron model's vocabulary, as it has more that pad it.

    Raises:
        CaptureError: the directory holds this rank's part already, or another snapshot, or cannot
            be written; ``module`` is none.
    """
    import torch

    if is_megatron(module):
        from layerbisect.captures.megatron.weights import save_weights as save_megatron

        return save_megatron(
            module,
            directory,
            label=label,
            values=values,
            weight_version=weight_version,
            vocab=vocab,
        )
    if not isinstance(module, torch.nn.Module):
        raise CaptureError(
            f"cannot save the weights of a {type(module).__name__}; give a module, or the list of "
            "a Megatron job's chunks"
        )
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if joined else 0
    world = torch.distributed.get_world_size() if joined else 1
    config = getattr(module, "config", None)
    quantized = _plain(getattr(config, "quantization_config", None))
    first = next(module.parameters(), None)
    info = SnapshotInfo(
        engine="transformers" if hasattr(config, "model_type") else "torch",
        engine_version=torch.__version__,
        label=label,
        dtype="" if first is None else str(first.dtype).removeprefix("torch."),
        world_size=world,
        values=values,
        weight_version=weight_version,
        tied=getattr(config, "tie_word_embeddings", None),
        block=block_of(quantized),
        parallel={"world": world},
    )
    hidden = getattr(config, "hidden_size", None)
    return write_rank(directory, info, rank, _parts(module, hidden))


def write_rank(
    directory: str | os.PathLike[str],
    info: SnapshotInfo,
    rank: int,
    parts: Iterable[Part],
    *,
    left_out: Mapping[str, str] | None = None,
    errors: tuple[str, ...] = (),
) -> Path:
    """Write one rank's parts of a snapshot, and return the directory.

    Each part is copied to the CPU alone, so that memory is bounded by the largest. What is no
    float tensor is left out, and the manifest says so.

    Raises:
        CaptureError: as :func:`save_weights`; two parts of one name.
    """
    target = Path(directory)
    folder = target / f"rank-{rank}"
    held: dict[str, Part] = {}
    skipped = dict(left_out or {})
    for part in parts:
        if dtype_name(part.values) is None:
            skipped[part.name] = f"{part.values.dtype} is no dtype of weights"
        elif part.name in held:
            raise CaptureError(f"two tensors are called {part.name}; rename one of them")
        elif part.values.numel():
            # a rank may hold nothing of a padded vocabulary
            held[part.name] = part
    try:
        target.mkdir(parents=True, exist_ok=True)
        _describe(target / WEIGHTS_FILE, info)
        try:
            folder.mkdir()
        except FileExistsError:
            raise CaptureError(
                f"{folder} is there already; name a new directory for each snapshot"
            ) from None
        headers = {
            name: PartHeader(str(dtype_name(p.values)), p.extents, digest(p.values))
            for name, p in held.items()
        }
        written = {
            name: _storable(part.values if info.values else sample(part.values))
            for name, part in held.items()
        }
        scratch = folder / f".{TENSORS_FILE}"
        write_tensors(scratch, written, {})
        scratch.replace(folder / TENSORS_FILE)
        _write_json(folder / MANIFEST_FILE, RankWeights(rank, headers, skipped, errors))
    except OSError as error:
        raise CaptureError(
            f"cannot write {target}: {error.strerror or error}; name another directory"
        ) from None
    return target


def block_of(quantization: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Read the block shape from a configuration's ``quantization_config``."""
    size = (quantization or {}).get("weight_block_size")
    return (int(size[0]), int(size[1])) if size else None


def _plain(config: Any) -> Mapping[str, Any] | None:
    made = config.to_dict() if hasattr(config, "to_dict") else config
    return made if isinstance(made, Mapping) else None


def _storable(values: torch.Tensor) -> torch.Tensor:
    # float8 goes as its bytes; the manifest has the dtype
    import torch

    return values.detach().view(torch.uint8) if values.itemsize == 1 else values


def _parts(module: torch.nn.Module, hidden: int | None) -> Iterator[Part]:
    named: dict[str, torch.Tensor] = dict(module.named_parameters())
    # some quantisers keep scales as buffers
    named |= {n: b for n, b in module.named_buffers() if n.endswith(SCALE)}
    for name, tensor in named.items():
        local, shards = _local(tensor)
        yield from logical_parts(Part.of(plain_name(name), local, shards), hidden)


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, dict[int, Extent]]:
    """Return what this process holds of a parameter, and which part that is."""
    if not hasattr(tensor, "to_local"):
        return tensor, {}
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    held: Any = tensor
    shape, offset = compute_local_shape_and_global_offset(
        held.shape, held.device_mesh, held.placements
    )
    local: torch.Tensor = held.to_local()
    cut = {
        dim: (start, start + size, int(total))
        for dim, (start, size, total) in enumerate(zip(offset, shape, held.shape, strict=True))
        if size != total
    }
    return local, cut


def _describe(path: Path, info: SnapshotInfo) -> None:
    """Write what all ranks write alike; raises CaptureError where another snapshot is there."""
    if path.is_file():
        if json.loads(path.read_text("utf-8")) != _jsonable(info):
            raise CaptureError(
                f"{path.parent} holds another snapshot; name a new directory for each"
            )
        return
    if path.parent.joinpath("config.json").exists():
        raise CaptureError(f"{path.parent} is a model directory; name a new directory")
    _write_json(path, info)


def _write_json(path: Path, record: SnapshotInfo | RankWeights) -> None:
    scratch = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    scratch.write_text(json.dumps(_jsonable(record)), "utf-8")
    scratch.replace(path)


def _jsonable(record: SnapshotInfo | RankWeights) -> Any:
    # tuples become lists, as they are when read
    return json.loads(json.dumps(dataclasses.asdict(record)))
