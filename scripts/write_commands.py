"""Write docs/commands.md: the help of every command, as the command line prints it.

    python scripts/write_commands.py            # write the page
    python scripts/write_commands.py --check    # say whether it is up to date, and write nothing

Exits with 1 where --check finds another text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from layerbisect.cli import main as layerbisect

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
WIDTH = 88
"""Columns, whatever the terminal at hand has."""

HEAD = """# Commands

Written by `python scripts/write_commands.py`: what `--help` prints. A test holds the page to it.

Of every command that judges, exit code 0 says that the sides agree, 1 that they diverge, and 2 that
it could not be judged, or that the command was given what it cannot use.
"""


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for path, text in helps(layerbisect, "layerbisect", None):
        parts.append(f"{'#' * min(len(path.split()) + 1, 3)} {path}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def helps(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[tuple[str, str]]:
    """Yield each command's full name and its help, a group before what is in it."""
    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=WIDTH, **command.context_settings
    )
    lines = command.get_help(context).splitlines()
    yield context.command_path, "\n".join(line.rstrip() for line in lines)
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            if found is not None and not found.hidden:
                yield from helps(found, inner, context)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    wanted = page()
    if not parser.parse_args(arguments).check:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == wanted:
        return 0
    print(
        f"{PAGE.name} is not what the commands' help says; run `python scripts/write_commands.py`",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
