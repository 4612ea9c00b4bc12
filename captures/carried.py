"""The carried gap as a live trainer read it out: a JSON file beside its capture."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.boundary_search import Mode
from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import SCHEMA, from_json, to_json
from layerbisect.captures.passes import read_text


@dataclass(frozen=True, slots=True)
class BoundaryGap:
    """Mean absolute difference (nat) that the rollout's state at a boundary makes."""

    boundary: int
    gap: float


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """What a live trainer carried of a rollout's states.

    ``rollout`` and ``trainer`` are the captures' labels; ``rows`` digests the keys of the rollout's
    rows and ``tokens`` counts the tokens that were compared; ``forwards`` are of the whole model,
    the one without the rollout's states included.
    """

    rollout: str
    trainer: str
    num_layers: int
    rows: str
    tokens: int
    mode: Mode
    forwards: int
    gaps: tuple[BoundaryGap, ...]
    schema: int = SCHEMA

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file; raises CaptureError where that fails."""
        file = Path(path)
        temporary = file.with_name(f".{file.name}.tmp")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(to_json(self, indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, file)
        except OSError as error:
            raise CaptureError(
                f"cannot write {file}: {error.strerror}; name a writable place"
            ) from None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> CarriedFile:
        """Read the file; raises CaptureError for anything but a whole one."""
        file = Path(path)
        found = from_json(cls, read_text(file), file)
        boundaries = [one.boundary for one in found.gaps]
        inside = all(0 <= layer <= found.num_layers for layer in boundaries)
        finite = all(np.isfinite(one.gap) and one.gap >= 0 for one in found.gaps)
        if not boundaries or len(set(boundaries)) < len(boundaries) or not inside or not finite:
            raise CaptureError(
                f"{file} is damaged: {len(boundaries)} gaps at boundaries {boundaries} of "
                f"{found.num_layers} layers; run the live trainer again"
            )
        return found


def rows_digest(keys: NDArray[np.void]) -> str:
    """Digest keys (``KEY_DTYPE`` [row], sorted) as 32 hex digits."""
    data = np.stack([keys["high"], keys["low"]]).astype("<u8")
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
