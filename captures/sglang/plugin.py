"""Capture inside an SGLang server, through SGLang's own plugin entry point.

Installed with layerbisect and inert until a variable names a directory::

    LAYERBISECT_CAPTURE=/data/rollout python -m sglang.launch_server ...

``LAYERBISECT_POINTS``
    points or patterns, separated by commas; ``coarse`` where it is not set.
``LAYERBISECT_REQUESTS``
    pattern over request IDs (``rid``); every request but SGLang's own where it is not set.
``LAYERBISECT_LABEL``
    what to call this side; ``rollout`` where it is not set.

``LAYERBISECT_WEIGHTS`` asks for snapshots of the weights instead, or as well: one whenever the
server is asked for checksums and the weights have changed since the last, see
`layerbisect.captures.sglang.weight_session`.

Where ``SGLANG_PLATFORM`` names a platform of another package, SGLang leaves out every other package
that has a platform, and so this one.

Nothing here raises into the engine or changes what it computes. Each process of a tensor-parallel
server writes its own part, without talking to the others.
"""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path
from typing import Any

from layerbisect.captures.sglang.batch import WARM_UP
from layerbisect.captures.sglang.session import Session, guarded
from layerbisect.captures.sglang.weight_session import DIRECTORY as WEIGHTS
from layerbisect.captures.sglang.weight_session import WeightSession

log = logging.getLogger("layerbisect")

DIRECTORY = "LAYERBISECT_CAPTURE"
REFUSED = "LAYERBISECT_REFUSED"
_CHECKED = "LAYERBISECT_CHECKED"


def name_warm_up(manager: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``TokenizerManager.generate_request``: name what SGLang asks itself while starting."""
    with guarded("naming a warm-up request"):
        starting = getattr(getattr(manager, "server_status", None), "name", "") == "Starting"
        if starting and getattr(request, "rid", "") is None:
            request.rid = f"{WARM_UP}_{uuid.uuid4().hex}"


def _refuse_old(directory: Path) -> None:
    """Refuse a directory that holds anything, once, in the process that starts the others.

    A rank of its own cannot tell an old capture from what the other ranks have just begun.
    """
    if _CHECKED in os.environ:
        return
    os.environ[_CHECKED] = "1"
    os.environ.pop(REFUSED, None)
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists():
        os.environ[REFUSED] = "1"
        log.error(
            "layerbisect: %s is not an empty directory; name another one in %s. "
            "Serving goes on without capturing",
            directory,
            DIRECTORY,
        )


def _save_weights(directory: Path) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # not of the model runner: here every process has the checksums of all
    module = "sglang.srt.managers.scheduler_components.weight_updater"
    target = f"{module}.SchedulerWeightUpdaterManager.check_weights"
    HookRegistry.register(target, WeightSession(directory).checked, HookType.AFTER)


def register() -> None:
    """Entry point of ``sglang.srt.plugins``, called once in each process of the server."""
    weights = os.environ.get(WEIGHTS)
    if weights:
        _save_weights(Path(weights))
    named = os.environ.get(DIRECTORY)
    if not named:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    directory = Path(named)
    _refuse_old(directory)
    if REFUSED in os.environ:
        return
    session = Session(directory)
    srt = "sglang.srt"
    runner = f"{srt}.model_executor.model_runner.ModelRunner"
    for target, hook, kind in (
        (f"{runner}.load_model", session.loaded, HookType.AFTER),
        (f"{runner}.forward", session.forward, HookType.AROUND),
        (
            f"{srt}.managers.tp_worker.TpModelWorker.forward_batch_generation",
            session.batch,
            HookType.AROUND,
        ),
        (f"{srt}.managers.scheduler.Scheduler.on_idle", session.idle, HookType.BEFORE),
        (
            f"{srt}.managers.tokenizer_manager.TokenizerManager.generate_request",
            name_warm_up,
            HookType.BEFORE,
        ),
    ):
        HookRegistry.register(target, hook, kind)
