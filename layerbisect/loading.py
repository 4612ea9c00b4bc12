"""Load a checkpoint into transformers, and refuse one that does not fit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerbisect.captures.errors import LayerBisectError, ModelDirectoryError

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32")
ATTENTION = ("eager", "sdpa")


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint's config.json; raises ModelDirectoryError where there is none."""
    path = Path(directory) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ModelDirectoryError(
            f"no config.json in {directory}; give the directory of a Hugging Face checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"cannot read {path} ({error}); save it again") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("vocab_size"), int):
        raise ModelDirectoryError(f"{path} gives no vocab_size; give a language model's checkpoint")
    return raw


def load_model(
    directory: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    attention: str = "sdpa",
    device: str = "cpu",
) -> torch.nn.Module:
    """Load a causal language model for a forward without gradients.

    Args:
        dtype: one of `DTYPES`; the checkpoint's own where it is None.
        attention: one of `ATTENTION`.
        device: as torch names it.

    Raises:
        ModelDirectoryError: no checkpoint there, or weights that do not fit the configuration.
        LayerBisectError: transformers is not installed, or no such device.
    """
    read_config(directory)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise LayerBisectError(
            f"{error.name} is not installed: run pip install 'layerbisect[transformers]'"
        ) from None
    from layerbisect.bisect.checkpoint import Checkpoint

    # says in one sentence what transformers says in many: no weights, or a truncated file
    Checkpoint(Path(directory))
    with _quiet():
        try:
            model, seen = transformers.AutoModelForCausalLM.from_pretrained(
                directory,
                dtype="auto" if dtype is None else getattr(torch, dtype),
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ModelDirectoryError(
                f"transformers cannot load {directory}: {first.rstrip('.')}"
            ) from None
    for kind, names in seen.items():
        # weights that are not there would be drawn at random, with no more than a warning
        if names:
            raise ModelDirectoryError(
                f"the weights in {directory} do not fit its config.json: "
                f"{kind.replace('_', ' ')} {_first(names)}; save the checkpoint again"
            )
    try:
        return model.eval().to(torch.device(device))  # type: ignore[no-any-return]
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise LayerBisectError(f"cannot use device {device!r}: {first}") from None


def _first(names: Any) -> str:
    listed = sorted(map(str, names))
    return f"{listed[0]!r}" + (f" and {len(listed) - 1} more" if listed[1:] else "")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' own progress bars and warnings while it loads."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
