"""The capture format, schema 1: what is written into a capture directory, and its checks.

::

    capture.json                    CaptureInfo: engine, model, weights, parallel layout
    rank-0/manifest.json            RankManifest: points seen and how, errors, finished or not
    rank-0/pass-000000.safetensors  one forward pass of one rank, with a PassHeader
    rank-1/...

A pass file holds ``rows.sequence``, ``rows.position``, ``rows.token`` and one tensor a point with a
row each; ``context.*``, rows whose tokens are known though they were not computed in this pass (a
cached prefix); and ``scores.*``, the log-probs of tokens given their prefixes, which have rows of
their own because a pass scores the token that comes after its last row.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from layerbisect.captures.errors import CaptureError

SCHEMA = 1
HEADER_KEY = "layerbisect"
CAPTURE_FILE = "capture.json"
MANIFEST_FILE = "manifest.json"

How = Literal["observed", "derived", "partial_sum", "not_observable"]
Phase = Literal["forward", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """What a capture is of: everything that is the same in all its ranks and passes.

    ``model_config`` is the model's configuration as its config.json has it; ``fingerprints`` maps
    a checkpoint tensor's name to a digest of a sample of its values, where the engine holds it
    unpacked and unsharded.
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
    """What one rank wrote. ``passes`` is listed when the rank has finished, and empty before."""

    rank: int
    world_size: int
    finished: bool
    points: Mapping[str, PointSeen] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    passes: tuple[PassSummary, ...] = ()
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Which part of a logical tensor a pass file holds.

    ``dims`` names the dimensions; ``shards`` gives ``[start, stop, total]`` for each sharded one;
    ``partial_sum`` is ``[index, count]`` where the values of ``count`` ranks must still be added.
    """

    dims: tuple[str, ...]
    shards: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    partial_sum: tuple[int, int] | None = None
    how: How = "observed"


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A sequence's name (a request ID, say) and what else is in its scoring context."""

    name: str
    salt: str = ""


@dataclass(frozen=True, slots=True)
class PassHeader:
    """The header of a pass file; ``order`` is the order in which the points were computed."""

    index: int
    phase: Phase
    sequences: tuple[SequenceInfo, ...]
    order: tuple[str, ...]
    tensors: Mapping[str, TensorHeader]
    schema: int = SCHEMA


_NESTED = {
    "points": PointSeen,
    "passes": PassSummary,
    "sequences": SequenceInfo,
    "tensors": TensorHeader,
}
_Record = TypeVar("_Record", CaptureInfo, RankManifest, PassHeader)


def to_json(record: CaptureInfo | RankManifest | PassHeader, indent: int | None = None) -> str:
    """Serialize a record."""
    return json.dumps(dataclasses.asdict(record), ensure_ascii=False, indent=indent)


def from_json(kind: type[_Record], text: str | bytes, source: Path) -> _Record:
    """Parse a record; raises CaptureError naming ``source`` for anything but a whole one."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"{source} is not JSON: {error}; the capture is damaged") from None
    if not isinstance(raw, dict):
        raise CaptureError(f"{source} holds {type(raw).__name__}, not an object")
    if raw.get("schema") != SCHEMA:
        raise CaptureError(
            f"{source} has schema {raw.get('schema')!r}, and this version reads {SCHEMA}; "
            "capture again, or read it with the version that wrote it"
        )
    try:
        return _build(kind, raw)
    except (TypeError, ValueError, KeyError) as error:
        raise CaptureError(f"{source} is not a {kind.__name__}: {error}") from None


def _build(kind: Any, raw: Mapping[str, Any]) -> Any:
    known = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(raw.keys() - known.keys())
    if unknown:
        raise ValueError(f"unknown fields {unknown}")
    values = {}
    for name, value in raw.items():
        nested = _NESTED.get(name) if kind is not CaptureInfo else None
        if isinstance(value, list):
            value = tuple(_build(nested, v) if nested else v for v in value)
        elif isinstance(value, dict) and nested:
            value = {key: _build(nested, v) for key, v in value.items()}
        elif isinstance(value, dict) and name == "shards":
            value = {key: _shard(key, v) for key, v in value.items()}
        _check(kind, known[name].type, name, value)
        values[name] = value
    return kind(**values)


def _shard(dim: str, value: Any) -> tuple[int, int, int]:
    if not (isinstance(value, list) and len(value) == 3 and all(type(v) is int for v in value)):
        raise ValueError(f"shard of {dim!r} must be [start, stop, total], got {value!r}")
    start, stop, total = value
    if not 0 <= start < stop <= total:
        raise ValueError(f"shard of {dim!r} must lie within its total, got {value!r}")
    return start, stop, total


# field annotations are strings here; the outermost word decides
_WORDS = {"int": int, "str": str, "bool": bool, "tuple": tuple, "Mapping": dict}


def _check(kind: Any, annotation: Any, name: str, value: Any) -> None:
    if value is None and "None" in annotation:
        return
    expected = _WORDS.get(annotation.split("[")[0].split(" ")[0], str)
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise TypeError(
            f"{kind.__name__}.{name} must be {annotation}, got {type(value).__name__} {value!r:.80}"
        )
