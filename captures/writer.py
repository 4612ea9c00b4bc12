"""Write a capture directory, one rank at a time and one forward pass at a time.

Each pass is written to a temporary name and renamed, so a crash loses at most the pass in flight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import (
    CAPTURE_FILE,
    HEADER_KEY,
    MANIFEST_FILE,
    CaptureInfo,
    PassHeader,
    PassSummary,
    Phase,
    PointSeen,
    RankManifest,
    SequenceInfo,
    TensorHeader,
    to_json,
)
from layerbisect.captures.rows import Rows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs in nats (float [row]) of the rows' own tokens, each given its prefix."""

    rows: Rows
    logprob: NDArray[np.floating]


class CaptureWriter:
    """Writes one rank's part of a capture.

    Args:
        directory: the capture's directory, made if it is not there; rank 0 writes the description.
        info: what the capture is of.
        rank: this process's number among those that write the capture.
        world_size: how many processes write it.

    Raises:
        CaptureError: when the directory already holds a capture, or something that is none.
    """

    def __init__(
        self, directory: str | Path, info: CaptureInfo, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.directory = Path(directory)
        self.info = info
        self._folder = self.directory / f"rank-{rank}"
        self._passes: list[PassSummary] = []
        self._manifest = RankManifest(rank=rank, world_size=world_size, finished=False)
        self._claim()
        if rank == 0:
            _write_text(self.directory / CAPTURE_FILE, to_json(info, indent=1))
        self._save_manifest()

    def _claim(self) -> None:
        if self.directory.exists() and not self.directory.is_dir():
            raise CaptureError(f"{self.directory} is a file; name a directory for the capture")
        foreign = (
            [p.name for p in self.directory.iterdir() if not p.name.startswith("rank-")]
            if self.directory.is_dir()
            else []
        )
        is_first = self._manifest.rank == 0
        if CAPTURE_FILE in foreign and (is_first or self._folder.exists()):
            raise CaptureError(
                f"{self.directory} already holds a capture; name another directory or delete it"
            )
        if [name for name in foreign if name != CAPTURE_FILE and not name.startswith(".")]:
            raise CaptureError(
                f"{self.directory} holds other files ({sorted(foreign)[0]!r}); "
                "name an empty or a new directory for the capture"
            )
        try:
            self._folder.mkdir(parents=True)
        except FileExistsError:
            raise CaptureError(
                f"{self._folder} already holds a capture; name another directory or delete it"
            ) from None
        except OSError as error:
            raise CaptureError(
                f"cannot make {self._folder}: {error.strerror}; name a writable directory"
            ) from None

    def write_pass(
        self,
        phase: Phase,
        sequences: Sequence[SequenceInfo],
        rows: Rows,
        tensors: Mapping[str, torch.Tensor],
        headers: Mapping[str, TensorHeader],
        *,
        scores: Scores | None = None,
        context: Rows | None = None,
    ) -> None:
        """Write one forward pass.

        ``tensors`` maps a point to its values ([row, ...], any device, in order of computation),
        ``headers`` says which part of it they are; ``rows.sequence`` indexes ``sequences``.
        ``context`` holds tokens that these sequences had seen though no row here computed them.
        """
        import torch
        from safetensors.torch import save_file

        index = len(self._passes)
        stored: dict[str, torch.Tensor] = {}
        for group, table in (("rows", rows), ("context", context), ("scores", _rows_of(scores))):
            if table is not None and (len(table) or group == "rows"):
                stored[f"{group}.sequence"] = torch.from_numpy(table.sequence.copy())
                stored[f"{group}.position"] = torch.from_numpy(table.position.copy())
                stored[f"{group}.token"] = torch.from_numpy(table.token.copy())
        if scores is not None and len(scores.rows):
            stored["scores.logprob"] = torch.from_numpy(np.array(scores.logprob, np.float64))
        for name, value in tensors.items():
            if value.shape[0] != len(rows):
                raise CaptureError(
                    f"{name} has {value.shape[0]} rows in a pass of {len(rows)} rows"
                )
            stored[name] = value.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        header = PassHeader(
            index=index,
            phase=phase,
            sequences=tuple(sequences),
            order=tuple(tensors),
            tensors={name: headers[name] for name in tensors},
        )
        name = f"pass-{index:06d}.safetensors"
        temporary = self._folder / f".{name}.tmp"
        save_file(stored, temporary, metadata={HEADER_KEY: to_json(header)})
        os.replace(temporary, self._folder / name)
        self._passes.append(PassSummary(name, len(rows)))

    def points_seen(self, points: Mapping[str, PointSeen]) -> None:
        """Record how points are seen, or why they are not; saved at once where it is news."""
        news = {**self._manifest.points, **points}
        if news != self._manifest.points:
            self._manifest = replace(self._manifest, points=news)
            self._save_manifest()

    def error(self, message: str) -> None:
        """Record an error once; the engine goes on."""
        if message not in self._manifest.errors and len(self._manifest.errors) < 100:
            self._manifest = replace(self._manifest, errors=(*self._manifest.errors, message))
            self._save_manifest()

    def finish(self) -> None:
        """List the passes and mark this rank's part as whole."""
        self._manifest = replace(self._manifest, finished=True, passes=tuple(self._passes))
        self._save_manifest()

    def _save_manifest(self) -> None:
        _write_text(self._folder / MANIFEST_FILE, to_json(self._manifest, indent=1))


def _rows_of(scores: Scores | None) -> Rows | None:
    return None if scores is None else scores.rows


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text + "\n")
    os.replace(temporary, path)
