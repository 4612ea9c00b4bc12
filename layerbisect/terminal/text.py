"""Text as every page prints it: headlines, titles, lines that wrap, and commands that do not."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from layerbisect.bisect.verdict import Status
from layerbisect.wording import commands_in

STYLES: dict[Status, str] = {
    "agree": "bold green",
    "divergent": "bold red",
    "unstable": "bold yellow",
    "inconclusive": "bold yellow",
}


def headline_line(console: Console, text: str, style: str) -> None:
    """Print the first line; in a file it is one line, where it is looked for by its beginning."""
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


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
    """Print what to do next: words wrapped, and each command in backticks whole on its own line.

    What fits in one line is left in it.
    """
    if not text:
        return
    text = f"next: {text}"
    console.print()
    if cell_len(text) <= console.width:
        console.print(Text(text))
        return
    for number, (part, command) in enumerate(commands_in(text)):
        if command:
            console.print(Text(f"    {part}"), soft_wrap=True)
        else:
            line(console, part, 2 if number else 0, 0 if number else 2)


def next_command(console: Console, command: str) -> None:
    """Print a command to run next; it is copied, so it is never broken into lines."""
    if command:
        console.print()
        console.print(Text(f"next: {command}"), soft_wrap=True)
