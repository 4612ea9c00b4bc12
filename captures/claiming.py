"""Whether a directory may take a new capture."""

from __future__ import annotations

import os
from pathlib import Path

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import CAPTURE_FILE


def check_new(directory: Path) -> None:
    """Raise CaptureError where no rank of a capture could begin to write: something is there."""
    try:
        names = listed(directory)
    except OSError as error:
        raise CaptureError(
            f"cannot read {directory}: {error.strerror}; name a writable directory"
        ) from None
    if any(not name.startswith(".") for name in names):
        raise taken(directory)


def listed(directory: Path) -> list[str]:
    """List a directory for a capture; raises CaptureError where it holds other files."""
    if directory.exists() and not directory.is_dir():
        raise CaptureError(f"{directory} is a file; name a directory for the capture")
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    foreign = [n for n in names if n != CAPTURE_FILE and not n.startswith((".", "rank-"))]
    if foreign:
        raise CaptureError(
            f"{directory} holds other files ({foreign[0]!r}); "
            "name an empty or a new directory for the capture"
        )
    return names


def taken(directory: Path) -> CaptureError:
    """Say that a capture is in a directory already."""
    return CaptureError(f"{directory} already holds a capture; name another directory or delete it")
