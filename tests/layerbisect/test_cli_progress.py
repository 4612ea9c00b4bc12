"""Progress shows only what takes long, and then what is left."""

import io
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from layerbisect import progress as module
from layerbisect.bisect.progress import NoProgress, Progress
from layerbisect.progress import ConsoleProgress, shown


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=100), out


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert happened()


def test_what_is_over_soon_shows_nothing() -> None:
    console, out = terminal()
    with shown(console) as progress:
        progress.start("quick", 3)
        for done in range(1, 4):
            progress.advance(done)
        progress.done()
    assert out.getvalue() == ""


def test_a_bar_appears_without_a_step_and_says_what_is_left() -> None:
    console, out = terminal()
    progress = ConsoleProgress(console, delay=0.05)
    progress.start("first stage", 10)
    wait_until(lambda: "first stage" in out.getvalue())
    assert " 0/10" in out.getvalue() and "left" in out.getvalue()
    progress.advance(4, 8)
    wait_until(lambda: "4/8" in out.getvalue())
    progress.start("second stage", 2)
    wait_until(lambda: "second stage" in out.getvalue())
    progress.close()
    written = out.getvalue()
    # the cursor is shown again, and nothing is written any more
    assert written.rindex("\x1b[?25h") > written.rindex("second stage")
    progress.start("late", 1)
    progress.close()
    assert "late" not in out.getvalue()


def test_without_a_terminal_it_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, width=100)
    with shown(console) as progress:
        progress.start("stage", 4)
        progress.advance(1)
        assert out.getvalue() == ""
        monkeypatch.setattr(module, "LINE_EVERY", 0.0)
        progress.advance(2)
    assert out.getvalue() == "stage: 2 of 4, about 0 s left\n"


def test_both_kinds_fit_the_protocol() -> None:
    kinds: list[Progress] = [NoProgress(), ConsoleProgress(terminal()[0])]
    for one in kinds:
        one.start("stage", 1)
        one.advance(1, 1)
        one.done()
        one.advance(2)
    assert isinstance(kinds[1], ConsoleProgress)
    kinds[1].close()
