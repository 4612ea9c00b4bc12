"""Command lines that README and the pages show are ones that the command line takes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from layerbisect.cli import main

ROOT = Path(__file__).parents[2]
# commands.md is written from the commands themselves
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.name != "commands.md"
]


def shown(markdown: str) -> Iterator[list[str]]:
    """Words of each command line of layerbisect in code, a placeholder for what is left out."""
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"layerbisect +[a-z]", line):
                yield shlex.split(line, comments=True)[1:]
    text = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`layerbisect +([a-z][^`\n]*)`", text):
        yield shlex.split(code)


def check(words: list[str]) -> None:
    """Walk down to the command, and look its options up."""
    command: click.Command = main
    while isinstance(command, click.Group):
        if not words:
            return
        name, *words = words
        assert name in command.commands, name
        command = command.commands[name]
    options = {o: p for p in command.params if isinstance(p, click.Option) for o in p.opts}
    options |= {
        o: p for p in command.params if isinstance(p, click.Option) for o in p.secondary_opts
    }
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == "--":
            # what follows is another program's
            return
        if not word.startswith("-") or word == "--help":
            continue
        assert word in options, f"{command.name} has no {word}"
        kind = options[word].type
        if isinstance(kind, click.Choice) and not options[word].is_flag:
            assert following in kind.choices, f"{word} {following}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in shown(page.read_text(encoding="utf-8")):
        check(words)


def test_wrong_ones_are_noticed() -> None:
    page = "```\nlayerbisect bisect a b \\\n    --modle policy   # a comment\n```\n"
    with pytest.raises(AssertionError, match="--modle"):
        check(next(shown(page)))
    with pytest.raises(AssertionError, match="bisetc"):
        check(next(shown("run `layerbisect bisetc a b`")))
