"""Progress for people: bars on stderr with the time that is left, once something takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

DELAY = 1.5
"""Seconds of work before a bar shows: what takes two seconds has one, what takes one has none."""
LINE_EVERY = 10.0
"""Seconds between two lines where stderr is no terminal, as in a log of a batch job."""


class ConsoleProgress:
    """Shows stages one after another; implements `layerbisect.bisect.progress.Progress`.

    On a terminal it is a bar; elsewhere a line now and then. It is shown by a timer and not by the
    next step, so that one long step is announced too. Build with :func:`shown`.
    """

    def __init__(self, console: Console, *, delay: float = DELAY) -> None:
        self._console = console
        self._lock = threading.RLock()
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._stage: tuple[str, int] | None = None
        self._done = 0
        self._since = self._said = time.monotonic()
        self._timer = threading.Timer(delay, self._show)
        self._timer.daemon = True
        self._timer.start()

    def start(self, description: str, total: int) -> None:
        """Begin a stage of ``total`` steps."""
        with self._lock:
            self.done()
            self._stage, self._done = (description, total), 0
            self._since = self._said = time.monotonic()
            self._add()

    def advance(self, done: int, total: int | None = None) -> None:
        """Say how many steps of the stage are done by now."""
        with self._lock:
            if self._stage is None:
                return
            self._stage = (self._stage[0], self._stage[1] if total is None else total)
            self._done = done
            if self._bars is not None and self._task is not None:
                self._bars.update(self._task, completed=done, total=self._stage[1])
            elif not self._console.is_terminal:
                self._line()

    def done(self) -> None:
        """End the stage."""
        with self._lock:
            self._stage = None
            if self._bars is not None and self._task is not None:
                self._bars.remove_task(self._task)
                self._task = None

    def close(self) -> None:
        """Take everything off the screen."""
        self._timer.cancel()
        with self._lock:
            self.done()
            if self._bars is not None:
                self._bars.stop()
                self._bars = None

    def _show(self) -> None:
        with self._lock:
            # the timer may have been cancelled while it waited for the lock
            if self._timer.finished.is_set() or not self._console.is_terminal:
                return
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self._console,
                transient=True,
            )
            self._add()
            self._bars.start()

    def _add(self) -> None:
        if self._bars is not None and self._stage is not None:
            self._task = self._bars.add_task(
                self._stage[0], total=self._stage[1], completed=self._done
            )

    def _line(self) -> None:
        now = time.monotonic()
        if self._stage is None or now - self._said < LINE_EVERY or not self._done:
            return
        self._said = now
        name, total = self._stage
        left = (now - self._since) / self._done * max(total - self._done, 0)
        self._console.print(f"{name}: {self._done} of {total}, about {left:.0f} s left")


def of_replays(progress: ConsoleProgress, passes: int) -> Callable[[int, int], None]:
    """Make a callback that shows each replay, of so many, as a stage of its requests.

    It takes the requests of all replays that are done, beginning with none, and how many there are.
    """
    shown = 0

    def tell(done: int, total: int) -> None:
        nonlocal shown
        requests = max(total // passes, 1)
        number = min(done // requests + 1, passes)
        if number != shown:
            shown = number
            progress.start(f"replay {number} of {passes}", requests)
        progress.advance(done - (number - 1) * requests)

    return tell


@contextmanager
def shown(console: Console) -> Iterator[ConsoleProgress]:
    """Show progress on ``console`` while the block runs, and clear it on leaving."""
    progress = ConsoleProgress(console)
    try:
        yield progress
    finally:
        progress.close()
