"""Start workers, and tell what became of the implementation that took one down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from layerbisect.captures.errors import LayerBisectError
from layerbisect.kernels.replay.journal import Journal
from layerbisect.kernels.replay.worker import REFUSED, STARTED

PREPARE_S = 900.0
"""How long a worker may take to import packages and to compute the exact output."""

_POLL_S = 0.05
_WORKER = "layerbisect.kernels.replay.worker"


def supervise(
    bundle: Path,
    journal: Journal,
    device: str,
    times: int,
    known: str,
    names: Sequence[str],
    timeout_s: float,
) -> None:
    """Start workers on a bundle file until one gets through, and note in the journal what died.

    Raises LayerBisectError where a worker refuses, or ends before it starts an implementation.
    """
    command = [sys.executable, "-m", _WORKER, str(bundle), str(journal.path)]
    command += [device, str(times), known, *names]
    environment = dict(os.environ)
    if device == "cpu":
        # Triton reads this when it is imported; there is nothing else to run its kernels on
        environment.setdefault("TRITON_INTERPRET", "1")
    errors = bundle.with_name("stderr.txt")
    while not journal.finished:
        done = len(journal.results)
        with open(errors, "wb") as said:
            worker = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            try:
                ended = _watch(worker, journal, timeout_s)
            finally:
                _kill(worker)
        journal.refresh()
        if journal.finished:
            break
        if journal.failed:
            raise RuntimeError(f"the replayer failed in its own process: {journal.failed}")
        words = errors.read_text(errors="replace").rpartition(STARTED)[2].strip()
        last = words.splitlines()[-1] if words else ""
        if journal.started is not None:
            why = ended or f"its process {_ending(worker.returncode)} before it answered"
            if last and not ended:
                why += f" ({last})"
            journal.add("result", replace(journal.started, why=why))
        elif worker.returncode == REFUSED and last:
            raise LayerBisectError(last)
        elif len(journal.results) == done:
            raise LayerBisectError(
                "the process that runs implementations "
                f"{ended or _ending(worker.returncode)} before it started any{last and ': ' + last}"
            )


def _watch(worker: subprocess.Popen[bytes], journal: Journal, timeout_s: float) -> str:
    """Wait for a worker; returns why it must be ended, or nothing where it has ended by itself."""
    started, since, size = journal.started, time.monotonic(), -1
    # whatever keeps it from ending after its last word is of no interest
    while worker.poll() is None and not journal.finished:
        if (now := journal.path.stat().st_size) != size:
            size = now
            journal.refresh()
            if journal.started is not started:
                started, since = journal.started, time.monotonic()
        limit = PREPARE_S if started is None else timeout_s
        if time.monotonic() - since > limit:
            return f"no answer within {limit:g} s"
        time.sleep(_POLL_S)
    return ""


def _kill(worker: subprocess.Popen[bytes]) -> None:
    """End a worker and the processes that it started."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    worker.wait()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by {signal.Signals(-code).name}"
