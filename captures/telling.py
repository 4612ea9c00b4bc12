"""End a capture that a person made in a `with` block: tell them what it lacks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerbisect.captures.writer import CaptureWriter


class CaptureWarning(UserWarning):
    """Something kept a capture from being whole."""


class TellingWriter(CaptureWriter):
    """Also keeps the errors that it writes, to tell them on leaving the context."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.errors: list[str] = []
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> None:
        if message not in self.errors:
            self.errors.append(message)
        super().error(message)

    def close(self, passes: int) -> None:
        """Finish after so many passes were seen."""
        if not passes:
            self.error(
                "no forward pass was seen: call the captured model itself inside the context"
            )
        self.finish()


def warn_of(directory: Path, errors: Sequence[str]) -> None:
    """Warn once of what keeps a capture from being whole, on behalf of the caller's `with`."""
    if errors:
        others = f" (and {len(errors) - 1} more in its manifest)" if errors[1:] else ""
        warnings.warn(
            f"the capture {directory} is not whole: {errors[0]}{others}",
            CaptureWarning,
            stacklevel=3,
        )
