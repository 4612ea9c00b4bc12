"""Print what `layerbisect doctor` found: what is here, then what breaks a capture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from layerbisect.doctor.check import ORDER, Check, State
from layerbisect.doctor.command import Judged
from layerbisect.doctor.health import Health
from layerbisect.terminal.text import next_command, title
from layerbisect.wording import count

STYLES: dict[State, str] = {"ok": "green", "note": "cyan", "missing": "dim", "problem": "yellow"}
UNTRIED = "*"
"""Marks what was read in sources or documentation, and not tried on a GPU."""

_STATE = 9
_NARROWEST = 30


def render_health(health: Health, console: Console) -> None:
    """Print a machine's checks by section."""
    _section(console, "here", health.checks, first=True)
    _section(console, "captures possible here", health.captures)
    _section(console, "kernels that `layerbisect replay` can run here", health.replays)
    _section(console, "variables of this shell that change numbers", health.environment)


def render_judged(judged: Judged, console: Console, what: str) -> None:
    """Print what was found in an engine's settings; ``what`` says where they are from."""
    states = [one.state for one in judged.checks]
    counts = ", ".join(
        count(states.count(state), state) for state in ORDER[:2] if states.count(state)
    )
    title(console, f"{what} ({judged.engine}): {counts or 'nothing that breaks a capture'}")
    for check in judged.checks:
        _block(console, check)
    next_command(console, judged.next)


def render_footer(checks: Iterable[Check], console: Console) -> None:
    """Say what the mark means, where it was printed."""
    if not all(check.tried for check in checks):
        console.print()
        told = f"{UNTRIED} read in the engine's source or documentation; not tried on a GPU"
        console.print(Text(told, style="dim"))


def _section(
    console: Console, heading: str, checks: Sequence[Check], *, first: bool = False
) -> None:
    if first:
        console.print(Text(heading, style="bold"))
    else:
        title(console, heading)
    width = max(len(check.name) for check in checks) + 2
    short = width <= 22
    for check in checks:
        parts = [check.found, *(part for part in (check.effect, check.advice) if part)]
        said = "; ".join(parts)
        if short:
            _hanging(console, check, check.name.ljust(width), said)
        else:
            _block(console, check)


def _hanging(console: Console, check: Check, label: str, said: str) -> None:
    left = _STATE + len(label)
    for number, line in enumerate(_wrapped(console, said, left)):
        text = Text(" " * left)
        if not number:
            text = Text.assemble(_state(check), label)
        console.print(text.append_text(line), soft_wrap=True)


def _block(console: Console, check: Check) -> None:
    """Print a check in full: what was found, then what it does, then what to do."""
    label = f"{check.name}: "
    if check.found.startswith(check.name):
        label = ""
    for number, line in enumerate(_wrapped(console, label + check.found, _STATE)):
        text = Text(" " * _STATE)
        if not number:
            text = _state(check)
            line.stylize("bold", 0, len(label.rstrip(": ")))
        console.print(Text.assemble(text, line), soft_wrap=True)
    if check.effect:
        _indented(console, check.effect)
    if check.advice:
        _indented(console, f"do: {check.advice}")


def _state(check: Check) -> Text:
    mark = "" if check.tried else UNTRIED
    return Text(f"{check.state}{mark}".ljust(_STATE), style=STYLES[check.state])


def _indented(console: Console, said: str) -> None:
    for line in _wrapped(console, said, _STATE + 2):
        console.print(Padding(line, (0, 0, 0, _STATE + 2), expand=False))


def _wrapped(console: Console, said: str, left: int) -> list[Text]:
    lines = Text(said).wrap(console, max(console.width - left, _NARROWEST))
    for line in lines:
        line.rstrip()
    return list(lines)
