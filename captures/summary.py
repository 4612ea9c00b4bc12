"""Say what a capture holds, without reading the values of any point."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from layerbisect.captures.format import How, Phase
from layerbisect.captures.forward_mode import ForwardMode
from layerbisect.captures.points import all_points
from layerbisect.captures.rows import PrefixKeys
from layerbisect.captures.store import Capture


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """How many forward passes of one kind there are, and how many rows they computed."""

    passes: int
    rows: int


@dataclass(frozen=True, slots=True)
class SequenceSummary:
    """One sequence: ``length`` in tokens, and how many ``rows`` of it were recorded.

    ``keyless`` counts the rows whose prefix has a hole, which cannot be joined.
    """

    name: str
    salt: str
    length: int
    rows: int
    keyless: int


@dataclass(frozen=True, slots=True)
class PointSummary:
    """One point: how it was seen or why not, in how many rows, as what, and its bytes on disk.

    ``shape`` is that of one row of the whole tensor; None, as ``dtype``, where no pass holds it.
    """

    name: str
    how: How
    reason: str
    rows: int
    dtype: str | None
    shape: tuple[int, ...] | None
    bytes: int


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """What a capture holds; ``bytes`` is the size of its passes on disk.

    ``repeated_rows`` counts rows whose prefix is there once more, before them: free repeats.
    """

    directory: str
    label: str
    engine: str
    engine_version: str
    device: str
    dtype: str
    num_layers: int
    moe_layers: tuple[int, ...]
    weight_version: str | None
    parallel: Mapping[str, int]
    ranks: int
    finished: bool
    phases: Mapping[Phase, PhaseSummary]
    modes: tuple[ForwardMode, ...]
    rows: int
    keyless_rows: int
    repeated_rows: int
    scores: int
    repeated_scores: int
    sequences: tuple[SequenceSummary, ...]
    points: tuple[PointSummary, ...]
    bytes: int
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, ready for ``json.dumps``."""
        return dataclasses.asdict(self)


def summarize(capture: Capture) -> CaptureSummary:
    """Count what an open capture holds."""
    info = capture.info
    phases: dict[Phase, PhaseSummary] = {}
    for one in capture.passes:
        before = phases.get(one.phase, PhaseSummary(0, 0))
        phases[one.phase] = PhaseSummary(before.passes + 1, before.rows + len(one.rows))
    files = [file for one in capture.passes for file in one.ranks]
    if capture.recomputed:
        again = Capture.open(capture.directory, recomputed=True)
        phases["recompute"] = PhaseSummary(len(again.passes), len(again.rows))
        files += [file for one in again.passes for file in one.ranks]
    return CaptureSummary(
        directory=str(capture.directory),
        label=capture.label,
        engine=info.engine,
        engine_version=info.engine_version,
        device=info.device,
        dtype=info.dtype,
        num_layers=info.num_layers,
        moe_layers=info.moe_layers,
        weight_version=info.weight_version,
        parallel=dict(info.parallel),
        ranks=len({file.path.parent for file in files}),
        finished=capture.finished,
        phases=phases,
        modes=capture.modes,
        rows=len(capture.rows),
        keyless_rows=int((~capture.keys.known).sum()),
        repeated_rows=_repeats(capture.keys),
        scores=len(capture.scores.rows),
        repeated_scores=_repeats(capture.scores.keys),
        sequences=_sequences(capture),
        points=_points(capture),
        bytes=sum(file.size for file in files),
        problems=capture.problems,
    )


def _repeats(keys: PrefixKeys) -> int:
    return int(keys.known.sum()) - len(np.unique(keys.key[keys.known]))


def _sequences(capture: Capture) -> tuple[SequenceSummary, ...]:
    count = len(capture.sequences)
    length = np.zeros(count, np.int64)
    for table in (capture.rows, capture.scores.rows):
        np.maximum.at(length, table.sequence, table.position.astype(np.int64) + 1)
    rows = np.bincount(capture.rows.sequence, minlength=count)
    keyless = np.bincount(capture.rows.sequence[~capture.keys.known], minlength=count)
    return tuple(
        SequenceSummary(s.name, s.salt, int(length[i]), int(rows[i]), int(keyless[i]))
        for i, s in enumerate(capture.sequences)
    )


def _points(capture: Capture) -> tuple[PointSummary, ...]:
    rows = dict.fromkeys(capture.points, 0)
    size = dict.fromkeys(capture.points, 0)
    looks: dict[str, tuple[str | None, tuple[int, ...] | None]] = {}
    for one in capture.passes:
        for name in set().union(*(file.tensors for file in one.ranks)):
            rows[name] += len(one.rows)
        for file in one.ranks:
            for name, header in file.tensors.items():
                size[name] += file.bytes_of(name)
                if name not in looks:
                    looks[name] = (file.dtype(name), header.whole(file.shape(name))[1:])
    order = {n: i for i, n in enumerate(all_points(capture.info.num_layers, moe=True))}
    names = sorted(capture.points, key=lambda name: order.get(name, len(order)))
    found = []
    for name in names:
        seen, (dtype, shape) = capture.points[name], looks.get(name, (None, None))
        found.append(
            PointSummary(name, seen.how, seen.reason, rows[name], dtype, shape, size[name])
        )
    return tuple(found)
