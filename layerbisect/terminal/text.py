"""Text as every page prints it: titles, and lines that wrap under their own beginning."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from layerbisect.bisect.verdict import Status
from layerbisect.captures.forward_mode import ForwardMode
from layerbisect.wording import count

STYLES: dict[Status, str] = {
    "agree": "bold green",
    "divergent": "bold red",
    "unstable": "bold yellow",
    "inconclusive": "bold yellow",
}


def mode_words(mode: ForwardMode) -> str:
    """Say in which mode a model was called."""
    parts = [
        f"{'train' if mode.training else 'eval'} mode",
        f"{'with' if mode.gradients else 'without'} gradients",
    ]
    if mode.dropout:
        parts.append(f"dropout in {count(len(mode.dropout), 'module')}")
    parts += [mode.recompute] if mode.recompute else []
    return ", ".join([*parts, *(f"{name} {value}" for name, value in mode.noise.items())])


def title(console: Console, text: str) -> None:
    """Print a title, and a blank line before it."""
    console.print()
    console.print(Text(text, style="bold"))


def line(console: Console, text: str, indent: int, hang: int = 0) -> None:
    """Print text that is wrapped; lines after the first are indented by ``hang`` more."""
    width = max(console.width - indent - hang, 20)
    for number, wrapped in enumerate(Text(text).wrap(console, width)):
        wrapped.rstrip()
        left = indent + (hang if number else 0)
        console.print(Padding(wrapped, (0, 0, 0, left), expand=False))


def next_line(console: Console, text: str) -> None:
    """Print what to run next; a command is copied, so it is never broken into lines."""
    if text:
        console.print()
        console.print(Text(f"next: {text}"), soft_wrap=True)
