"""Read a capture: its rows and their prefix keys at once, its points one by one.

Needs numpy alone. Files are mapped and a point's rows are assembled from all ranks when they are
asked for, so memory is bounded by one point and not by the capture.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import (
    CAPTURE_FILE,
    MANIFEST_FILE,
    CaptureInfo,
    Phase,
    PointSeen,
    RankManifest,
    SequenceInfo,
    from_json,
)
from layerbisect.captures.passfile import PassFile
from layerbisect.captures.rows import PrefixKeys, Rows, prefix_keys
from layerbisect.captures.shards import Piece, assemble

_PASS_NAME = re.compile(r"pass-\d{6,}\.safetensors")


@dataclass(frozen=True, slots=True)
class _Pass:
    """One forward pass of all ranks.

    ``start`` is where its rows begin among the capture's; ``local[r]`` (int [row]) gives each row's
    place in rank r's file, or -1.
    """

    phase: Phase
    ranks: tuple[PassFile, ...]
    local: tuple[NDArray[np.intp], ...]
    rows: Rows
    start: int


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """Log-probs (float64 [row], nat) of tokens given their prefixes, and the tokens' keys."""

    rows: Rows
    keys: PrefixKeys
    logprob: NDArray[np.float64]


@dataclass(frozen=True)
class Capture:
    """A capture opened for reading.

    ``rows`` and ``keys`` describe every row in the order of the passes; ``phases`` gives each row's
    pass kind; ``problems`` says in sentences what is not whole; ``replica_findings`` fills, while
    points are read, with those of which two ranks hold different copies. Build with :meth:`open`.
    """

    directory: Path
    info: CaptureInfo
    label: str
    finished: bool
    problems: tuple[str, ...]
    sequences: tuple[SequenceInfo, ...]
    rows: Rows
    keys: PrefixKeys
    phases: NDArray[np.str_]
    scores: ScoreTable
    points: dict[str, PointSeen]
    replica_findings: dict[str, str]
    _passes: tuple[_Pass, ...]

    @classmethod
    def open(
        cls, directory: str | Path, *, label: str | None = None, requests: str = "*"
    ) -> Capture:
        """Open a capture directory.

        Args:
            directory: what a capture was written into.
            label: what to call this side, instead of the label that it was captured with.
            requests: pattern over sequence names; only these sequences' rows are read, so that one
                server's capture can hold both a generation and its replay.

        Raises:
            CaptureError: no capture there, a damaged file, no rows, or no sequence that matches.
        """
        folder = Path(directory)
        if not (folder / CAPTURE_FILE).is_file():
            raise CaptureError(
                f"{folder} holds no capture (no {CAPTURE_FILE}); make one with "
                "`layerbisect capture` or by setting LAYERBISECT_CAPTURE for the server"
            )
        info = from_json(CaptureInfo, _text(folder / CAPTURE_FILE), folder / CAPTURE_FILE)
        manifests, problems = _manifests(folder)
        files = [_pass_files(folder / f"rank-{m.rank}", m) for m in manifests]
        count = max((len(f) for f in files), default=0)
        if len({len(f) for f in files}) > 1:
            problems.append(f"ranks wrote unequal numbers of passes: {[len(f) for f in files]}")
            count = min(len(f) for f in files)
        reader = _Gatherer(requests)
        for index in range(count):
            reader.add(tuple(f[index] for f in files))
        if not reader.passes or not len(reader.rows):
            names = sorted({s.name for f in files for p in f for s in p.header.sequences})
            raise CaptureError(
                f"{folder} is an empty capture: no forward pass was recorded"
                if not names
                else f"{folder} has no sequence that matches {requests!r}; it has {names[:5]}"
            )
        finished = all(m.finished for m in manifests) and not problems
        if not all(m.finished for m in manifests):
            problems.append("the capture was not finished: the engine still runs, or it died")
        problems += [f"rank {m.rank}: {error}" for m in manifests for error in m.errors]
        salts = [s.salt for s in reader.sequences]
        return cls(
            directory=folder,
            info=info,
            label=label or info.label,
            finished=finished,
            problems=tuple(problems),
            sequences=tuple(reader.sequences),
            rows=reader.rows,
            keys=prefix_keys(reader.rows, reader.seen, salts),
            phases=np.concatenate([np.full(len(p.rows), p.phase) for p in reader.passes]),
            scores=ScoreTable(
                reader.scored,
                prefix_keys(reader.scored, reader.seen, salts),
                np.concatenate(reader.logprobs) if reader.logprobs else np.empty(0),
            ),
            points=_points(manifests, reader.passes),
            replica_findings={},
            _passes=tuple(reader.passes),
        )

    def has(self, point: str) -> NDArray[np.bool_]:
        """Say for each row (bool [row]) whether ``point`` was recorded in its pass."""
        present = [np.full(len(p.rows), any(point in f for f in p.ranks)) for p in self._passes]
        return np.concatenate(present)

    def read(self, point: str, rows: NDArray[np.intp] | None = None) -> NDArray[Any]:
        """Read a point's values ([row, ...]) for all rows, or for those indexed, in that order.

        bfloat16 and float16 come as float32, which holds them exactly. Shards are assembled, and
        partial sums are added in float32 and rounded to the dtype in which they were captured.

        Raises:
            CaptureError: a row's pass does not hold the point, shards that do not tile it, or
                replicas of it that disagree.
        """
        wanted = np.arange(len(self.rows)) if rows is None else np.asarray(rows, np.intp)
        parts: list[NDArray[Any]] = []
        places: list[NDArray[np.intp]] = []
        for one in self._passes:
            inside = np.flatnonzero((wanted >= one.start) & (wanted < one.start + len(one.rows)))
            if len(inside):
                places.append(inside)
                parts.append(self._assemble(one, point, wanted[inside] - one.start))
        if not parts:
            raise CaptureError(f"no rows of {point} were asked for")
        shapes = {p.shape[1:] for p in parts}
        if len(shapes) > 1:
            raise CaptureError(
                f"{self.directory}: {point} changes its shape between passes: {shapes}"
            )
        out = np.empty((len(wanted), *parts[0].shape[1:]), parts[0].dtype)
        for place, part in zip(places, parts, strict=True):
            out[place] = part
        return out

    def _assemble(self, one: _Pass, point: str, index: NDArray[np.intp]) -> NDArray[Any]:
        pieces = []
        for file, local in zip(one.ranks, one.local, strict=True):
            if point in file.header.tensors:
                held = np.flatnonzero(local[index] >= 0)
                values = file.read(point, local[index][held])
                header = file.header.tensors[point]
                pieces.append(Piece(header, held, values, file.dtype(point), file.path.parent.name))
        if not pieces:
            raise CaptureError(
                f"{self.directory} does not hold {point} for {len(index)} of its rows; "
                f"capture it with points={point!r}"
            )
        try:
            whole = assemble(pieces, len(index))
        except CaptureError as error:
            raise CaptureError(f"{self.directory}: {point}: {error}") from None
        for sentence in whole.disagreements:
            self.replica_findings.setdefault(point, sentence)
        return whole.values

    def labelled(self, label: str) -> Capture:
        """Call this side something else."""
        return replace(self, label=label)


class _Gatherer:
    """Collects rows over passes, numbering sequences by name and keeping those that match."""

    def __init__(self, requests: str) -> None:
        self.requests = requests
        self.sequences: list[SequenceInfo] = []
        self.passes: list[_Pass] = []
        self.logprobs: list[NDArray[np.float64]] = []
        self._number: dict[str, int] = {}
        self._rows: list[Rows] = []
        self._seen: list[Rows] = []
        self._scored: list[Rows] = []
        self._start = 0

    def add(self, ranks: tuple[PassFile, ...]) -> None:
        tables = [self._renumber(file, file.rows) for file in ranks]
        rows = _union([table for table, _ in tables])
        if len(rows):
            local = tuple(_places(table, np.flatnonzero(kept), rows) for table, kept in tables)
            self.passes.append(_Pass(ranks[0].header.phase, ranks, local, rows, self._start))
            self._rows.append(rows)
            self._start += len(rows)
        for file in ranks:
            self._seen.append(self._renumber(file, file.table("context"))[0])
        # every rank that scores has the same scores: one of them is enough
        for file in ranks:
            scored, kept = self._renumber(file, file.table("scores"))
            if len(scored):
                self._scored.append(scored)
                self.logprobs.append(np.asarray(file.read("scores.logprob")[kept], np.float64))
                break

    def _renumber(self, file: PassFile, rows: Rows) -> tuple[Rows, NDArray[np.bool_]]:
        wanted = [fnmatch.fnmatchcase(s.name, self.requests) for s in file.header.sequences]
        number = np.full(len(wanted), -1, np.int32)
        for local, sequence in enumerate(file.header.sequences):
            if wanted[local]:
                number[local] = self._number.setdefault(sequence.name, len(self._number))
                if number[local] == len(self.sequences):
                    self.sequences.append(sequence)
        kept = number[rows.sequence] >= 0 if len(rows) else np.zeros(0, bool)
        picked = rows.take(kept)
        return Rows(number[picked.sequence], picked.position, picked.token), kept

    @property
    def rows(self) -> Rows:
        return Rows.concatenate(self._rows)

    @property
    def scored(self) -> Rows:
        return Rows.concatenate(self._scored)

    @property
    def seen(self) -> Rows:
        return Rows.concatenate([*self._rows, *self._seen, *self._scored])


def _union(tables: Sequence[Rows]) -> Rows:
    """Merge the ranks' rows of one pass: usually the same rows on every rank."""
    first = tables[0]
    if all(
        np.array_equal(first.sequence, t.sequence) and np.array_equal(first.position, t.position)
        for t in tables[1:]
    ):
        return first
    merged = Rows.concatenate(tables)
    _, index = np.unique(np.stack([merged.sequence, merged.position]), axis=1, return_index=True)
    return merged.take(np.sort(index))


def _places(table: Rows, at: NDArray[np.intp], rows: Rows) -> NDArray[np.intp]:
    """Where each of ``rows`` lies in a rank's file, given its kept rows and their places there."""
    if len(table) == len(rows):
        return at
    stride = np.int64(max(rows.position.max(), 0)) + 1
    wanted = rows.sequence * stride + rows.position
    held = table.sequence * stride + table.position
    order = np.argsort(held)
    slot = np.searchsorted(held[order], wanted).clip(max=max(len(held) - 1, 0))
    places = np.full(len(rows), -1, np.intp)
    if len(held):
        found = held[order][slot] == wanted
        places[found] = at[order][slot[found]]
    return places


def _manifests(folder: Path) -> tuple[list[RankManifest], list[str]]:
    found: list[RankManifest] = []
    for path in sorted(folder.glob(f"rank-*/{MANIFEST_FILE}")):
        manifest = from_json(RankManifest, _text(path), path)
        if path.parent.name != f"rank-{manifest.rank}":
            raise CaptureError(f"{path} is of rank {manifest.rank}, not of its folder's")
        found.append(manifest)
    found.sort(key=lambda m: m.rank)
    if not found:
        raise CaptureError(f"{folder} is an empty capture: no rank wrote anything")
    expected = set(range(max(m.world_size for m in found)))
    missing = sorted(expected - {m.rank for m in found})
    return found, [f"ranks {missing} wrote nothing"] if missing else []


def _pass_files(folder: Path, manifest: RankManifest) -> list[PassFile]:
    names = [summary.file for summary in manifest.passes]
    for name in names:
        if not _PASS_NAME.fullmatch(name) or (folder / name).is_symlink():
            raise CaptureError(
                f"{folder / MANIFEST_FILE} names {name!r}, which is not a pass of this capture; "
                "a manifest may only name files beside it"
            )
    if not manifest.finished:
        names = sorted(p.name for p in folder.iterdir() if _PASS_NAME.fullmatch(p.name))
    files = []
    for name in names:
        if not (folder / name).is_file():
            raise CaptureError(
                f"{folder} lists {name} and does not hold it; the capture is damaged"
            )
        files.append(PassFile(folder / name))
    for summary, file in zip(manifest.passes, files, strict=False):
        if summary.rows != len(file.rows):
            raise CaptureError(
                f"{file.path} has {len(file.rows)} rows, and its manifest says {summary.rows}"
            )
    return files


def _points(manifests: Sequence[RankManifest], passes: Sequence[_Pass]) -> dict[str, PointSeen]:
    points: dict[str, PointSeen] = {}
    for manifest in manifests:
        for name, seen in manifest.points.items():
            if name not in points or points[name].how == "not_observable":
                points[name] = seen
    for one in passes:
        for file in one.ranks:
            for name, header in file.header.tensors.items():
                if name not in points or points[name].how == "not_observable":
                    points[name] = PointSeen(header.how)
    return points


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CaptureError(f"cannot read {path}: {error}") from None
