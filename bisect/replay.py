"""Replay operators of a capture, or of a bundle: the public function."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerbisect.bisect.progress import Progress
    from layerbisect.kernels.replay.report import Replay


def replay(
    source: str | PathLike[str],
    *,
    model: str | PathLike[str] | None = None,
    layer: int | None = None,
    operator: str | None = None,
    point: str | None = None,
    implementations: Sequence[str] = (),
    requests: str = "*",
    rows: int = 4096,
    device: str = "auto",
    resume: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> tuple[Replay, ...]:
    """Run operators on what an engine gave them, by every implementation that there is.

    Each runs in a process of its own; on a CPU, Triton's kernels are run by its interpreter.

    Args:
        source: a capture directory, or an operator bundle (a file).
        model: the checkpoint that the captured engine ran; a bundle has its weights.
        layer: the layer whose operators are replayed; the final norm and the head without it.
        operator: only this one, in a verdict's words: norm, linear, rope, attention, router,
            experts, combine, residual, head.
        point: only what makes this point, such as ``layers.9.attn.context``.
        implementations: names of those to run; all of them where none is given.
        requests: pattern over the names of the capture's sequences.
        rows: how many rows are taken at most, or the first sequence where rows attend.
        device: ``cpu``, ``cuda``, or ``auto``: a GPU where torch finds one.
        resume: directory that keeps what is done, to go on from there after a crash.
        progress: told what is done.

    Returns one `Replay` a stretch of operators between captured points, in the order of
    computation.

    Raises:
        LayerBisectError: a source that is neither, that does not show what is asked for, or whose
            model does not fit; an unknown implementation; a device that is not there.
    """
    # public names are to be had before torch is
    from layerbisect.bisect.chosen_bundles import choose
    from layerbisect.bisect.replay_bundles import replay_all

    chosen = choose(
        source,
        model=model,
        layer=layer,
        operator=operator,
        point=point,
        requests=requests,
        rows=rows,
    )
    return replay_all(
        chosen.bundles,
        implementations=implementations,
        device=device,
        resume=resume,
        progress=progress,
    )
