"""Read a capture: its rows and their prefix keys at once, its points one by one.

Needs numpy alone. Files are mapped and a point's rows are assembled from all ranks when they are
asked for, so memory is bounded by one point and not by the capture.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import (
    CAPTURE_FILE,
    CaptureInfo,
    PointSeen,
    RankManifest,
    SequenceInfo,
    TensorHeader,
    from_json,
)
from layerbisect.captures.forward_mode import ForwardMode, merged
from layerbisect.captures.gather import Gatherer, JointPass
from layerbisect.captures.passes import pair, read_manifests, read_passes, read_text
from layerbisect.captures.rows import PrefixKeys, Rows, prefix_keys
from layerbisect.captures.shards import Disagreement, Piece, assemble
from layerbisect.captures.weight_states import WeightFinding, changed, gather_fingerprints


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """Log-probs (float64 [row], nat) of tokens given their prefixes, and the tokens' keys."""

    rows: Rows
    keys: PrefixKeys
    logprob: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Capture:
    """A capture opened for reading.

    ``rows`` and ``keys`` describe every row in the order of the passes; ``phases`` gives each row's
    pass kind; ``problems`` says in sentences what is not whole; ``weight_findings`` has the ranks
    that hold different values of a tensor; ``replica_findings`` fills, while points are read, with
    those of which two ranks hold different copies. ``modes`` are those in which the model was
    called, as far as the engine tells. Build with :meth:`open`.
    """

    directory: Path
    info: CaptureInfo
    label: str
    finished: bool
    problems: tuple[str, ...]
    weight_findings: tuple[WeightFinding, ...]
    sequences: tuple[SequenceInfo, ...]
    rows: Rows
    keys: PrefixKeys
    phases: NDArray[np.str_]
    scores: ScoreTable
    points: dict[str, PointSeen]
    replica_findings: dict[str, Disagreement]
    passes: tuple[JointPass, ...]
    modes: tuple[ForwardMode, ...]

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        label: str | None = None,
        requests: str = "*",
        recomputed: bool = False,
    ) -> Capture:
        """Open a capture directory.

        Args:
            directory: what a capture was written into.
            label: what to call this side, instead of the label that it was captured with.
            requests: pattern over sequence names; only these sequences' rows are read, so that one
                server's capture can hold both a generation and its replay.
            recomputed: read what backwards computed again, and not what forwards computed.

        Raises:
            CaptureError: no capture there, a damaged file, no rows, or no sequence that matches.
        """
        folder = Path(directory)
        if not (folder / CAPTURE_FILE).is_file():
            raise CaptureError(
                f"{folder} holds no capture (no {CAPTURE_FILE}); make one with "
                "`layerbisect capture` or by setting LAYERBISECT_CAPTURE for the server"
            )
        info = from_json(CaptureInfo, read_text(folder / CAPTURE_FILE), folder / CAPTURE_FILE)
        manifests = read_manifests(folder)
        files = [
            read_passes(folder / f"rank-{m.rank}", m, recomputed=recomputed) for m in manifests
        ]
        joint, missing_passes = pair(manifests, files, recomputed=recomputed)
        fingerprints, weight_findings = gather_fingerprints(info.fingerprints, manifests)
        gathered = Gatherer(requests)
        for ranks in joint:
            gathered.add(ranks)
        if not gathered.passes:
            raise _empty(folder, requests, gathered.names, manifests)
        gaps = _missing_ranks(manifests) + missing_passes + gathered.problems
        unfinished = _unfinished(manifests)
        errors = [f"{m}: {error}" for m in manifests for error in m.errors]
        rows, (scored, logprob) = gathered.rows(), gathered.scored()
        seen = Rows.concatenate([gathered.seen(), rows, scored])
        salts, names = [s.salt for s in gathered.sequences], [s.name for s in gathered.sequences]
        try:
            keys, score_keys = (prefix_keys(part, seen, salts, names) for part in (rows, scored))
        except CaptureError as error:
            raise CaptureError(f"{folder}: {error}") from None
        return cls(
            directory=folder,
            info=replace(info, fingerprints=fingerprints),
            label=label or info.label,
            finished=not unfinished and not gaps,
            problems=(*gaps, *unfinished, *map(str, weight_findings), *errors),
            weight_findings=weight_findings,
            sequences=tuple(gathered.sequences),
            rows=rows,
            keys=keys,
            phases=np.repeat(
                [one.phase for one in gathered.passes], [len(one.rows) for one in gathered.passes]
            ),
            scores=ScoreTable(scored, score_keys, logprob),
            points=_points(manifests, gathered.passes),
            replica_findings={},
            passes=tuple(gathered.passes),
            modes=merged(mode for m in manifests for mode in m.modes),
        )

    @property
    def recomputed(self) -> bool:
        """Whether the capture also holds what a backward computed again."""
        return any(self.directory.glob("rank-*/again-*.safetensors"))

    @property
    def weights_moved(self) -> str | None:
        """The problem that makes rows be of several states of the weights; None where none does."""
        return next(map(str, self.weight_findings), changed(self.problems))

    @property
    def vocab(self) -> int | None:
        """How many tokens the log-probs are over, where ranks wrote them in parts."""
        parts = (f.header.vocab for one in self.passes for f in one.ranks)
        return next((vocab[2] for vocab in parts if vocab is not None), None)

    def has(self, point: str) -> NDArray[np.bool_]:
        """Say for each row (bool [row]) whether ``point`` was recorded in its pass."""
        present = [any(point in file.tensors for file in one.ranks) for one in self.passes]
        return np.repeat(present, [len(one.rows) for one in self.passes])

    def read(
        self, point: str, rows: NDArray[np.intp] | NDArray[np.bool_] | None = None
    ) -> NDArray[Any]:
        """Read a point's values ([row, ...]) for all rows, or for those indexed, in that order.

        bfloat16 and float16 come as float32, which holds them exactly. Shards are assembled, and
        partial sums are added in float32 and rounded to the dtype in which they were captured.
        ``rows`` may be a mask, too.

        Raises:
            CaptureError: a row's pass does not hold the point, or shards do not tile it.
            IndexError: ``rows`` names a row that is not there.
        """
        wanted = self._wanted(point, rows)
        starts = np.array([one.start for one in self.passes])
        number = np.searchsorted(starts, wanted, side="right") - 1
        order = np.argsort(number, kind="stable")
        used, begins = np.unique(number[order], return_index=True)
        out: NDArray[Any] | None = None
        for at, places in zip(used, np.split(order, begins[1:]), strict=True):
            one = self.passes[at]
            part = self._assemble(one, point, wanted[places] - one.start)
            if len(used) == 1:
                return part
            if out is None:
                out = np.empty((len(wanted), *part.shape[1:]), part.dtype)
            if part.shape[1:] != out.shape[1:] or part.dtype != out.dtype:
                raise CaptureError(
                    f"{self.directory}: {point} is {out.dtype} {list(out.shape[1:])} in one pass "
                    f"and {part.dtype} {list(part.shape[1:])} in another; capture again"
                )
            out[places] = part
        assert out is not None
        return out

    def _wanted(
        self, point: str, rows: NDArray[np.intp] | NDArray[np.bool_] | None
    ) -> NDArray[np.intp]:
        if rows is None:
            index = np.arange(len(self.rows))
        elif np.asarray(rows).dtype == bool:
            index = np.arange(len(self.rows))[rows]
        else:
            index = np.asarray(rows, np.intp)
        if not len(index):
            raise CaptureError(f"no rows of {point} were asked for")
        if index.min() < 0 or index.max() >= len(self.rows):
            raise IndexError(
                f"rows {index.min()} to {index.max()} of {self.directory}, "
                f"which has rows 0 to {len(self.rows) - 1}"
            )
        return index

    def _assemble(self, one: JointPass, point: str, index: NDArray[np.intp]) -> NDArray[Any]:
        pieces = []
        for file, local in zip(one.ranks, one.local, strict=True):
            header = file.tensors.get(point)
            if header is not None:
                start, stop, _ = header.shards.get("row", (0, len(file.rows), 0))
                place = np.where(local[index] < stop, local[index] - start, -1)
                held = np.flatnonzero(place >= 0)
                values = file.read(point, place[held])
                pieces.append(Piece(header, held, values, file.dtype(point), file.path.parent.name))
        if not pieces:
            raise CaptureError(
                f"{self.directory} does not hold {point} for {int((~self.has(point)).sum())} of "
                f"its {len(self.rows)} rows; capture it with points={point!r}"
            )
        try:
            whole = assemble(pieces, len(index))
        except CaptureError as error:
            known = f" (known of this capture: {self.problems[0]})" if self.problems else ""
            raise CaptureError(f"{self.directory}: {point}: {error}{known}") from None
        for sentence in whole.disagreements:
            self.replica_findings.setdefault(point, sentence)
        return whole.values

    def labelled(self, label: str) -> Capture:
        """Call this side something else."""
        return replace(self, label=label)


def _missing_ranks(manifests: Sequence[RankManifest]) -> list[str]:
    missing = sorted(set(range(manifests[0].world_size)) - {m.rank for m in manifests})
    return [f"ranks {missing} of {manifests[0].world_size} wrote nothing"] if missing else []


def _unfinished(manifests: Sequence[RankManifest]) -> list[str]:
    names = [str(m) for m in manifests if not m.finished]
    if not names:
        return []
    more = f" and {len(names) - 4} more" if names[4:] else ""
    who = f" by {', '.join(names[:4])}{more}" if manifests[1:] else ""
    return [f"the capture was not finished{who}: the engine still runs, or it died"]


def _empty(
    folder: Path, requests: str, names: set[str], manifests: Sequence[RankManifest]
) -> CaptureError:
    if names:
        return CaptureError(
            f"{folder} has no rows of a sequence that matches {requests!r}; "
            f"it has {len(names)} sequences, such as {sorted(names)[:5]}"
        )
    errors = [f" (rank {m.rank} says: {m.errors[0]})" for m in manifests if m.errors]
    return CaptureError(
        f"{folder} is an empty capture: no forward pass was recorded; "
        f"capture again{''.join(errors[:1])}"
    )


def _points(manifests: Sequence[RankManifest], passes: Sequence[JointPass]) -> dict[str, PointSeen]:
    """How each point is seen: as the ranks say, and in any case where a pass holds it."""
    points: dict[str, PointSeen] = {}
    # passes of one kind share one table
    tables: dict[int, Mapping[str, TensorHeader]] = {
        id(file.tensors): file.tensors for one in passes for file in one.ranks
    }
    told = [m.points for m in manifests]
    held = [{n: PointSeen(h.how) for n, h in table.items()} for table in tables.values()]
    for name, seen in ((n, s) for table in (*told, *held) for n, s in table.items()):
        if name not in points or points[name].how == "not_observable":
            points[name] = seen
    return points
