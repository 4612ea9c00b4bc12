"""Snapshots of the weights that an SGLang server holds, taken when it is asked for checksums.

Inert until a variable names a directory::

    LAYERBISECT_WEIGHTS=/data/weights python -m sglang.launch_server ...
    curl -X POST localhost:30000/weights_checker -H 'Content-Type: application/json' \\
        -d '{"action": "checksum"}'

The first such request writes /data/weights/000, and is answered once every process has written its
part. A later one writes the next (001, ...) where the weights have changed since: where the
checksums or the weight version are others, or the last snapshot is there no more. So the newest
snapshot is of the weights at the last request. Only where a process does not see the checksums of
all others, as over pipeline stages, or a request leaves tensors out, each writes one.

``LAYERBISECT_WEIGHTS_FORM=digests`` keeps a digest of each tensor and a sample of its values, for
models too large to write.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from layerbisect.captures.sglang.info import weight_version
from layerbisect.captures.sglang.layout import Layout, layout_of
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
        self._last: tuple[str | None, tuple[str, ...]] | None = None

    def checked(self, answer: Any, updater: Any, request: Any) -> None:
        """After ``SchedulerWeightUpdaterManager.check_weights``: write what changed since."""
        # a draft model is not the policy
        if request.action != "checksum" or request.selector == "draft" or not answer.success:
            return
        target = self.directory / f"{self._next:03d}"
        try:
            runner = updater.tp_worker.model_runner
            layout = layout_of(runner)
            held = _identity(answer, request, runner, layout.world)
            last = self.directory / f"{self._next - 1:03d}"
            if held is not None and held == self._last and last.is_dir():
                log.info("layerbisect: the weights are still those of %s", last)
                return
            # whether or not it can be written, so that all processes go on counting alike
            self._last = held
            self._next += 1
            self._write(runner, layout, target)
            log.info("layerbisect: wrote the weights into %s", target)
        except Exception as error:  # whatever our hook does, serving goes on
            log.error("layerbisect: writing the weights into %s: %s", target, error)

    def _write(self, runner: Any, layout: Layout, target: Path) -> None:
        from sglang.version import __version__

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


def _identity(
    answer: Any, request: Any, runner: Any, world: int
) -> tuple[str | None, tuple[str, ...]] | None:
    """Weight version and every process's checksum; None where they do not tell all weights.

    All processes must come to the same, which they do from what SGLang gathers for each of them.
    """
    sums = tuple(str(rank.per_gpu_checksum) for rank in answer.payload or ())
    if request.skip_tensor_list or len(sums) != world:
        return None
    return weight_version(runner), sums
