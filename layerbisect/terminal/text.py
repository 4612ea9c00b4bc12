"""Text as every page prints it: titles, and lines that wrap under their own beginning."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from layerbisect.bisect.verdict import Status

STYLES: dict[Status, str] = {
    "agree": "bold green",
    "divergent": "bold red",
    "unstable": "bold yellow",
    "inconclusive": "bold yellow",
}


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
