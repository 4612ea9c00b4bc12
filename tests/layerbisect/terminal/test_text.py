"""What to do next, at any width: words wrap, and a command is copied in one piece."""

import io
import re

import pytest
from rich.console import Console

from layerbisect.bisect.scores.next_step import next_step
from layerbisect.terminal.text import next_command, next_line

REPLAY = "layerbisect replay captures/rollout --model models/policy --layer 8 --operator rope"
BISECT = (
    "layerbisect bisect SERVER SERVER --rollout-requests 'gen-*' --trainer-requests 'replay-*' "
    "--labels decode,prefill --model DIR"
)


def printed(text: str, width: int) -> list[str]:
    out = io.StringIO()
    next_line(Console(file=out, width=width, highlight=False, color_system=None), text)
    return [line.rstrip() for line in out.getvalue().split("\n")]


def test_what_fits_is_one_line() -> None:
    assert printed(f"`{REPLAY}`", 100) == ["", f"next: `{REPLAY}`", ""]


@pytest.mark.parametrize("width", [40, 80, 100])
def test_words_wrap_and_each_command_has_a_line(width: int) -> None:
    said = f"compare the scores that the engine returned; then `{BISECT}`, and after it `{REPLAY}`"
    lines = printed(said, width)
    assert f"    {BISECT}" in lines and f"    {REPLAY}" in lines
    words = [line for line in lines if "layerbisect " not in line]
    assert max(map(len, words)) <= width
    told = " ".join(" ".join(words).split())
    assert told == "next: compare the scores that the engine returned; then and after it"


def test_a_command_alone_that_is_too_long_is_below_its_label() -> None:
    assert printed(f"`{REPLAY}`", 80) == ["", "next:", f"    {REPLAY}", ""]


def test_what_is_only_named_stays_among_the_words() -> None:
    said = "do it again and again " * 5 + "(`layerbisect scores judge`, `layerbisect capture`)"
    lines = printed(said, 80)
    assert max(map(len, lines)) <= 80
    assert "`layerbisect capture`" in " ".join(" ".join(lines).split())


def test_a_bare_command_is_never_broken() -> None:
    out = io.StringIO()
    command = f"LAYERBISECT_CAPTURE=a {BISECT}"
    next_command(Console(file=out, width=40, highlight=False), command)
    assert out.getvalue() == f"\nnext: {command}\n"


def test_every_step_of_a_verdict_on_scores_fits() -> None:
    for status in ("agree", "unstable", "inconclusive", "divergent"):
        said = next_step(status, (), None, (), {})  # type: ignore[arg-type]
        for line in printed(said, 80):
            assert len(line) <= 80 or re.match(r"    layerbisect \w+", line)


def test_nothing_to_do_prints_nothing() -> None:
    assert printed("", 80) == [""]
