"""The carried gap as a live trainer read it out: a JSON file beside its capture."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.boundary_search import Mode
from layerbisect.captures.chains import Chains, first_of_each
from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import SCHEMA, from_json, to_json
from layerbisect.captures.passes import read_text
from layerbisect.captures.points import boundary
from layerbisect.captures.store import Capture

SAMPLE = 64
"""So many rows of each boundary tell one run of a rollout from another on the same tokens."""


@dataclass(frozen=True, slots=True)
class BoundaryGap:
    """Mean absolute difference (nat) that the rollout's state at a boundary makes."""

    boundary: int
    gap: float


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """What a live trainer carried of a rollout's states.

    ``rollout`` and ``trainer`` are the captures' labels; ``rows`` digests the keys of the rollout's
    rows and ``states`` a sample of what was carried; ``weights`` digests the fingerprints of the
    job's weights. ``tokens`` counts the tokens that were compared, and ``scores`` has the trainer's
    own log-prob (nat) of each, in the order of their keys, None where it is not finite;
    ``forwards`` are of the whole model, the one without the rollout's states included.
    """

    rollout: str
    trainer: str
    num_layers: int
    rows: str
    states: str
    weights: str
    tokens: int
    mode: Mode
    forwards: int
    gaps: tuple[BoundaryGap, ...]
    scores: tuple[float | None, ...]
    schema: int = SCHEMA

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a new file; raises CaptureError where that fails, or one is there already."""
        file = Path(path)
        check_unwritten(file)
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
        if len(found.scores) != found.tokens:
            raise CaptureError(
                f"{file} is damaged: {len(found.scores)} scores of {found.tokens} tokens; run the "
                "live trainer again"
            )
        return found


def check_unwritten(file: Path) -> None:
    """Raise CaptureError where a file is there, which may be of another run."""
    if file.exists():
        raise CaptureError(
            f"{file} is there already, and is not overwritten; move it away, or name another place"
        )


def rows_digest(keys: NDArray[np.void]) -> str:
    """Digest keys (``KEY_DTYPE`` [row], sorted) as 32 hex digits."""
    data = np.stack([keys["high"], keys["low"]]).astype("<u8")
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


def states_digest(rollout: Capture) -> str:
    """Digest a sample of a capture's states at layer boundaries as 32 hex digits."""
    unique = first_of_each(rollout.keys)
    # keys are in no order of tokens, so that rows of all sequences and positions are among them
    rows = unique[:: max(1, -(-len(unique) // SAMPLE))]
    digest = hashlib.blake2b(digest_size=16)
    layers = rollout.info.num_layers
    for point in (boundary(layer, layers) for layer in range(layers + 1)):
        if point in rollout.points and rollout.has(point)[rows].all():
            digest.update(point.encode() + rollout.read(point, rows).tobytes())
    return digest.hexdigest()


def weights_digest(fingerprints: Mapping[str, str]) -> str:
    """Digest fingerprints of weights by their tensors' names; empty where there are none."""
    if not fingerprints:
        return ""
    text = "".join(f"{name} {digest}\n" for name, digest in sorted(fingerprints.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def in_key_order(chains: Chains, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pick what each place (float64 [flat]) has of its next token, by the tokens' keys: [token].

    ``chains`` were laid out of rows in the order of their keys.
    """
    place = np.flatnonzero(chains.scored)
    return values[place[np.argsort(chains.row[place + 1])]]
