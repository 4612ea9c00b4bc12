"""Write files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from layerbisect.captures.errors import LayerBisectError


def check_target(path: Path) -> None:
    """Raise LayerBisectError where there is something else than an ordinary file, or no folder."""
    if not path.resolve().parent.is_dir():
        raise LayerBisectError(f"{path}: there is no folder {path.parent}; make it first")
    if path.exists() and not path.is_file():
        raise LayerBisectError(f"{path} is there and is no ordinary file; name another one")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, or leave what was there; a link's target is written, and not the link.

    Raises LayerBisectError where it cannot be written.
    """
    check_target(path)
    target = path.resolve()
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise LayerBisectError(f"{path} cannot be written: {why}") from None


def _umask() -> int:
    # there is no way to read it but to set it
    mask = os.umask(0)
    os.umask(mask)
    return mask
