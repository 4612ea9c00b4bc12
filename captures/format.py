"""The capture format, schema 1: what is written into a capture directory, and its checks.

::

    capture.json                    CaptureInfo: engine, model, weights, parallel layout
    rank-0/manifest.json            RankManifest: points seen and how, errors, finished or not
    rank-0/pass-000000.safetensors  one forward pass of one rank: PassHeader and PassTensors
    rank-0/again-000000.safetensors what its backward computed again (activation recomputation)
    rank-1/...

A pass file holds ``rows.sequence``, ``rows.position``, ``rows.token`` and one tensor a point with a
row each; ``context.*``, rows whose tokens are known though they were not computed in this pass (a
cached prefix); and ``scores.*``, the log-probs of tokens given their prefixes, which have rows of
their own because a pass scores the token that comes after its last row. A rank that holds a part of
the vocabulary writes ``scores.logit``, ``scores.lse`` and ``scores.padding`` instead of
``scores.logprob``, and, of rows whose next token another rank holds, ``pending.*`` with their
logits; see captures/vocab_scores.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.forward_mode import ForwardMode
from layerbisect.captures.parsing import Parser

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA = 1
HEADER_KEY = "layerbisect"
TENSORS_KEY = "layerbisect.tensors"
CAPTURE_FILE = "capture.json"
MANIFEST_FILE = "manifest.json"

How = Literal["observed", "derived", "partial_sum", "not_observable"]
Phase = Literal["forward", "prefill", "decode", "recompute"]
RoutesFrom = Literal["own", "forced", "forced with weights"]


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """What a capture is of: everything that is the same in all its ranks and passes.

    ``model_config`` is the model's configuration as its config.json has it; ``fingerprints`` maps
    a checkpoint tensor's name to a digest of a sample of its values, where the engine holds it
    unpacked and unsharded. ``routes`` says whether experts were chosen by the model's own router,
    or were those of another capture, with or without that one's weights.
    """

    engine: str
    engine_version: str
    label: str
    device: str
    dtype: str
    num_layers: int
    moe_layers: tuple[int, ...]
    points: tuple[str, ...]
    model_config: Mapping[str, Any] = field(default_factory=dict)
    weight_version: str | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    parallel: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    routes: RoutesFrom = "own"
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class PassSummary:
    """A finished pass, as a finished manifest lists it."""

    file: str
    rows: int


@dataclass(frozen=True, slots=True)
class PointSeen:
    """How an engine shows a point, and why where it does not."""

    how: How
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RankManifest:
    """What one rank wrote. ``passes`` is listed when the rank has finished, and empty before.

    ``replica`` numbers the copies of the model that are given tokens of their own (data
    parallelism): only ranks of one replica have passes in common. ``name`` says where in the job
    the rank stands. ``fingerprints`` are of the tensors that this rank holds whole, as
    CaptureInfo has them. ``run`` is the same on all ranks that captured together, where they could
    agree on one. ``modes`` are those in which the model was called.
    """

    rank: int
    world_size: int
    finished: bool
    replica: int = 0
    name: str = ""
    run: str = ""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    points: Mapping[str, PointSeen] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    modes: tuple[ForwardMode, ...] = ()
    passes: tuple[PassSummary, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise CaptureError(f"there is no rank {self.rank} among {self.world_size}")

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})" if self.name else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Which part of a logical tensor a pass file holds.

    ``dims`` names the dimensions, ``row`` first; ``shards`` gives ``[start, stop, total]`` for each
    sharded one, where ``row`` counts in the rows of the pass file (sequence parallelism);
    ``partial_sum`` is ``[index, count]`` where the values of ``count`` ranks must
    still be added. Raises CaptureError for a part that cannot be.
    """

    dims: tuple[str, ...]
    shards: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    partial_sum: tuple[int, int] | None = None
    how: How = "observed"

    def __post_init__(self) -> None:
        if self.dims[:1] != ("row",) or len(set(self.dims)) != len(self.dims):
            raise CaptureError(f"dims must be distinct and start with 'row', got {self.dims}")
        for dim, (start, stop, total) in self.shards.items():
            if dim not in self.dims:
                raise CaptureError(f"shard of {dim!r}, which is none of {self.dims}")
            if not 0 <= start < stop <= total:
                raise CaptureError(
                    f"shard {dim}=[{start}, {stop}) does not lie within its total of {total}"
                )
        if self.partial_sum and not 0 <= self.partial_sum[0] < self.partial_sum[1]:
            raise CaptureError(f"partial_sum {self.partial_sum} is not [index, count]")

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the logical tensor, of which a part has ``shape``."""
        return tuple(
            self.shards[dim][2] if dim in self.shards else size
            for dim, size in zip(self.dims, shape, strict=True)
        )

    def check(self, shape: Sequence[int], rows: int) -> None:
        """Raise CaptureError unless a tensor of this shape, in a pass of so many rows, fits."""
        sizes = {"row": rows} | {d: stop - start for d, (start, stop, _) in self.shards.items()}
        if "row" in self.shards and self.shards["row"][2] != rows:
            raise CaptureError(f"a share of {self.shards['row'][2]} rows in a pass of {rows}")
        if len(shape) != len(self.dims) or any(
            size != sizes.get(dim, size) for dim, size in zip(self.dims, shape, strict=True)
        ):
            expected = ", ".join(f"{dim}={sizes.get(dim, 'any')}" for dim in self.dims)
            raise CaptureError(f"shape {list(shape)} does not fit [{expected}]")


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A sequence's name (a request ID, say) and what else is in its scoring context."""

    name: str
    salt: str = ""


@dataclass(frozen=True, slots=True)
class PassHeader:
    """What a forward pass was; ``index`` is the same on all ranks that took part in it.

    A ``recompute`` pass has the index of the pass that it computes again.

    ``vocab`` is ``[start, stop, total]`` of the vocabulary of which this rank wrote scores, where
    those are still to be combined.
    """

    index: int
    phase: Phase
    sequences: tuple[SequenceInfo, ...]
    vocab: tuple[int, int, int] | None = None
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class PassTensors:
    """What a pass file holds of each point, in the order in which the points were computed.

    Apart from the header, because it seldom changes from pass to pass and is parsed once then.
    """

    tensors: Mapping[str, TensorHeader]
    schema: int = SCHEMA


_Record = TypeVar("_Record", bound="DataclassInstance")
_PARSER = Parser()


def to_json(record: DataclassInstance, indent: int | None = None) -> str:
    """Serialize a record: a dataclass of this format with its ``schema``."""
    return json.dumps(dataclasses.asdict(record), indent=indent)


def from_json(kind: type[_Record], text: str | bytes, source: Path) -> _Record:
    """Parse a record; raises CaptureError naming ``source`` for anything but a whole one."""
    try:
        return from_text(kind, text)
    except CaptureError as error:
        raise CaptureError(f"{source} {error}; capture again") from None


def from_text(kind: type[_Record], text: str | bytes) -> _Record:
    """Parse a record; the CaptureError that it raises names no file."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"is damaged: it is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CaptureError(f"is damaged: it holds {raw!r:.40} and not an object")
    if raw.get("schema") != SCHEMA:
        raise CaptureError(
            f"has schema {raw.get('schema')!r:.40} and this version reads {SCHEMA}: "
            "read it with the version that wrote it"
        )
    try:
        record = _PARSER.build(kind, raw)
    except ValueError as error:
        raise CaptureError(f"is damaged: {error}") from None
    return record
