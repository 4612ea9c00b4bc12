"""Snapshots of the weights that an SGLang server holds, one each time it is asked for checksums.

Inert until a variable names a directory::

    LAYERBISECT_WEIGHTS=/data/weights python -m sglang.launch_server ...
    curl -X POST localhost:30000/weights_checker -H 'Content-Type: application/json' \\
        -d '{"action": "checksum"}'

Each such request writes the next of /data/weights/000, 001, ..., and is answered once every process
has written its part. ``LAYERBISECT_WEIGHTS_FORM=digests`` keeps a digest of each tensor and a
sample of its values, for models too large to write.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from layerbisect.captures.sglang.info import weight_version
from layerbisect.captures.sglang.layout import layout_of
from layerbisect.captures.sglang.weights import weights_of
from layerbisect.captures.weights.format import SnapshotInfo
from layerbisect.captures.weights.snapshot import block_of, write_rank

log = logging.getLogger("layerbisect")

DIRECTORY = "LAYERBISECT_WEIGHTS"
FORM = "LAYERBISECT_WEIGHTS_FORM"
_FIRST = "LAYERBISECT_WEIGHTS_FIRST"


def first_free(directory: Path) -> int:
    """Number the next snapshot, alike in all processes: the one that starts the others decides."""
    if _FIRST not in os.environ:
        taken = [int(p.name) for p in directory.glob("[0-9]*") if p.name.isdecimal()]
        os.environ[_FIRST] = str(max(taken, default=-1) + 1)
    return int(os.environ[_FIRST])


class WeightSession:
    """Writes one process's part of each snapshot; the plugin hooks :meth:`checked` into SGLang."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._next = first_free(directory)

    def checked(self, _: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        """After ``ModelRunner.check_weights``: write a snapshot, if it was asked for checksums."""
        action = kwargs.get("action", args[0] if args else None)
        # a draft model is not the policy
        if action != "checksum" or runner.is_draft_worker:
            return
        target = self.directory / f"{self._next:03d}"
        self._next += 1
        try:
            self._write(runner, target)
            log.info("layerbisect: wrote the weights into %s", target)
        except Exception as error:  # whatever our hook does, serving goes on
            log.error("layerbisect: writing the weights into %s: %s", target, error)

    def _write(self, runner: Any, target: Path) -> None:
        from sglang.version import __version__

        layout = layout_of(runner)
        form = os.environ.get(FORM) or "values"
        quantization = getattr(runner.model_config.hf_config, "quantization_config", None)
        info = SnapshotInfo(
            engine="sglang",
            engine_version=__version__,
            label=os.environ.get("LAYERBISECT_LABEL") or "rollout",
            dtype=str(runner.dtype).removeprefix("torch."),
            world_size=layout.world,
            values=form != "digests",
            weight_version=weight_version(runner),
            tied=getattr(runner.model_config.hf_config, "tie_word_embeddings", None),
            block=block_of(quantization),
            parallel=layout.sizes,
        )
        try:
            if form not in ("values", "digests"):
                raise ValueError(f"{FORM} is {form!r}: set it to values or digests")
            parts, left_out = weights_of(runner)
        except Exception as error:
            # the snapshot itself says why it holds nothing
            write_rank(target, info, layout.rank, (), errors=(f"{type(error).__name__}: {error}",))
            raise
        write_rank(target, info, layout.rank, parts, left_out=left_out)
