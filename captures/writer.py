"""Write a capture directory, one rank at a time and one forward pass at a time.

Each pass is written to a temporary name and renamed, so a crash loses at most the pass in flight.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.claiming import listed, taken
from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import (
    CAPTURE_FILE,
    HEADER_KEY,
    MANIFEST_FILE,
    TENSORS_KEY,
    CaptureInfo,
    PassHeader,
    PassSummary,
    PassTensors,
    Phase,
    PointSeen,
    RankManifest,
    SequenceInfo,
    TensorHeader,
    to_json,
)
from layerbisect.captures.forward_mode import ForwardMode
from layerbisect.captures.rows import Rows
from layerbisect.captures.tensorfile import DTYPE_NAMES, write_tensors
from layerbisect.captures.vocab_scores import ShardScores

if TYPE_CHECKING:
    import torch

MAX_ERRORS = 100
"""How many different errors a rank's manifest holds at most."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs in nats (float [row]) of the rows' own tokens, each given its prefix."""

    rows: Rows
    logprob: NDArray[np.floating]


def check_tensor(name: str, value: torch.Tensor, header: TensorHeader, rows: int) -> None:
    """Raise CaptureError for a tensor that could be written and not be read again."""
    if str(value.dtype) not in DTYPE_NAMES:
        raise CaptureError(f"{name} is {value.dtype}, which a capture cannot hold; convert it")
    try:
        header.check(value.shape, rows)
    except CaptureError as error:
        raise CaptureError(f"{name}: {error}") from None


class CaptureWriter:
    """Writes one rank's part of a capture.

    Args:
        directory: the capture's directory, made if it is not there; rank 0 writes the description.
        info: what the capture is of.
        rank: this process's number among those that write the capture.
        world_size: how many processes write it.
        replica: which of the copies of the model that are given tokens of their own this one is of.
        name: where in the job this process stands.
        fingerprints: of the checkpoint tensors that this process holds whole.
        run: tells this capture from others in the same directory; the same on all ranks.

    Raises:
        CaptureError: when the directory already holds a capture, or something that is none.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        info: CaptureInfo,
        *,
        rank: int = 0,
        world_size: int = 1,
        replica: int = 0,
        name: str = "",
        fingerprints: Mapping[str, str] | None = None,
        run: str = "",
    ) -> None:
        self.directory = Path(directory)
        self.info = info
        self._folder = self.directory / f"rank-{rank}"
        self._passes: list[PassSummary] = []
        self._begun = 0
        self._last_tensors: tuple[tuple[tuple[str, TensorHeader], ...], str] = ((), "")
        self._manifest = RankManifest(
            rank=rank,
            world_size=world_size,
            finished=False,
            replica=replica,
            name=name,
            fingerprints=dict(fingerprints or {}),
            run=run,
        )
        try:
            description = to_json(info, indent=1)
        except (TypeError, ValueError) as error:
            raise CaptureError(f"what the capture is of cannot be JSON: {error}") from None
        self._claim()
        try:
            if rank == 0:
                _write_text(self.directory / CAPTURE_FILE, description)
            self._save_manifest()
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise CaptureError(
                f"cannot write {self.directory}: {error.strerror}; name another directory"
            ) from None

    def _claim(self) -> None:
        try:
            names = listed(self.directory)
            if (CAPTURE_FILE in names and self._manifest.rank == 0) or self._is_anothers(names):
                raise taken(self.directory)
            self._folder.mkdir(parents=True)
        except FileExistsError:
            raise CaptureError(
                f"{self._folder} is there already; name another directory or delete this one"
            ) from None
        except OSError as error:
            raise CaptureError(
                f"cannot make {self._folder}: {error.strerror}; name a writable directory"
            ) from None

    def _is_anothers(self, names: Sequence[str]) -> bool:
        """Say whether ranks wrote here that do not belong to this capture."""
        for path in (self.directory / name / MANIFEST_FILE for name in names):
            if path.is_file():
                try:
                    if json.loads(path.read_bytes())["world_size"] != self._manifest.world_size:
                        return True
                except (ValueError, TypeError, KeyError):
                    return True
        return False

    def write_pass(
        self,
        phase: Phase,
        sequences: Sequence[SequenceInfo],
        rows: Rows,
        tensors: Mapping[str, torch.Tensor],
        headers: Mapping[str, TensorHeader],
        *,
        scores: Scores | ShardScores | None = None,
        context: Rows | None = None,
        recomputes: int | None = None,
    ) -> int:
        """Write one forward pass, and return its number.

        ``tensors`` maps a point to its values ([row, ...], any device, in order of computation),
        ``headers`` says which part of it they are; ``rows.sequence`` indexes ``sequences``.
        ``context`` holds tokens that these sequences had seen though no row here computed them.
        ``recomputes`` is the number of the pass that this one computes again, and it has that
        number, too: ranks do not run their backwards in one order.

        Raises:
            CaptureError: values that do not fit their header or their rows, or that cannot be
                written; nothing is left of the pass then, and its number is not used again, so that
                the passes after it have the same number on all ranks.
        """
        import torch

        index, kind = recomputes, "again"
        if index is None:
            index, kind = self._begun, "pass"
            self._begun += 1
        if self._manifest.finished:
            raise CaptureError(f"{self._folder} is finished, and takes no further pass")
        stored: dict[str, torch.Tensor] = {}
        shard = scores if isinstance(scores, ShardScores) else None
        tables = {
            "rows": rows,
            "context": context,
            "scores": scores.rows if scores else None,
            "pending": shard.pending if shard else None,
        }
        for group, table in tables.items():
            if table is None or (not len(table) and group != "rows"):
                continue
            if len(table) and int(table.sequence.max()) >= len(sequences):
                raise CaptureError(f"{group} name sequence {table.sequence.max()}, which is none")
            for column in ("sequence", "position", "token"):
                stored[f"{group}.{column}"] = torch.from_numpy(getattr(table, column).copy())
        for column, values in _columns(scores).items():
            if len(values) != len(stored["scores.token"]):
                raise CaptureError(f"{len(values)} scores for {len(stored['scores.token'])} tokens")
            stored[column] = torch.from_numpy(np.array(values, np.float64))
        if shard is not None and len(shard.pending):
            stored["pending.logits"] = shard.logits
        for name, value in tensors.items():
            check_tensor(name, value, headers[name], len(rows))
            stored[name] = value
        name = f"{kind}-{index:06d}.safetensors"
        temporary = self._folder / f".{name}.tmp"
        metadata = {
            HEADER_KEY: to_json(
                PassHeader(index, phase, tuple(sequences), shard.vocab if shard else None)
            ),
            TENSORS_KEY: self._tensors_json({name: headers[name] for name in tensors}),
        }
        try:
            write_tensors(temporary, stored, metadata)
            os.replace(temporary, self._folder / name)
        except OSError as error:
            raise CaptureError(f"cannot write {self._folder / name}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
        self._passes.append(PassSummary(name, len(rows)))
        return index

    def skip_pass(self) -> None:
        """Leave a pass out, so that those after it have the same number on all ranks."""
        self._begun += 1

    def _tensors_json(self, headers: Mapping[str, TensorHeader]) -> str:
        # seldom changes from pass to pass
        items = tuple(headers.items())
        if items != self._last_tensors[0] or not self._last_tensors[1]:
            self._last_tensors = (items, to_json(PassTensors(headers)))
        return self._last_tensors[1]

    def points_seen(self, points: Mapping[str, PointSeen]) -> None:
        """Record how points are seen, or why they are not; saved at once where it is news."""
        news = {**self._manifest.points, **points}
        if news != self._manifest.points:
            self._manifest = replace(self._manifest, points=news)
            self._save_manifest()

    def error(self, message: str) -> None:
        """Record an error once; the engine goes on."""
        if message not in self._manifest.errors and len(self._manifest.errors) < MAX_ERRORS:
            self._manifest = replace(self._manifest, errors=(*self._manifest.errors, message))
            self._save_manifest()

    def called_in(self, mode: ForwardMode) -> None:
        """Record a mode in which the model is called, once."""
        if mode not in self._manifest.modes:
            self._manifest = replace(self._manifest, modes=(*self._manifest.modes, mode))
            self._save_manifest()

    def reopen(self) -> None:
        """Mark a finished part as unfinished again, before the next pass is computed.

        A server never ends: whenever it is idle its capture is whole, and then it goes on. All
        ranks reopen before any can answer a request, so that none looks finished meanwhile.
        """
        if self._manifest.finished:
            self._manifest = replace(self._manifest, finished=False, passes=())
            self._save_manifest()

    def finish(self) -> None:
        """List the passes and mark this rank's part as whole."""
        self._manifest = replace(self._manifest, finished=True, passes=tuple(self._passes))
        self._save_manifest()

    def _save_manifest(self) -> None:
        _write_text(self._folder / MANIFEST_FILE, to_json(self._manifest, indent=1))


def _columns(scores: Scores | ShardScores | None) -> dict[str, NDArray[np.floating]]:
    if scores is None or not len(scores.rows):
        return {}
    if isinstance(scores, ShardScores):
        return {f"scores.{c}": getattr(scores, c) for c in ("logit", "lse", "padding")}
    return {"scores.logprob": scores.logprob}


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
