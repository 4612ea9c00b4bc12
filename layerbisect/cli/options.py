"""What the commands share: options, and consoles for data (stdout) and talk (stderr)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from layerbisect.cli.boundary import echo_json

if TYPE_CHECKING:
    from rich.console import Console

    from layerbisect.bisect.verdict import Verdict


class Whole(click.IntRange):
    """A whole number in a range; click calls what is none "not a valid integer range"."""

    name = "integer"


class Positive(click.FloatRange):
    """A finite number above 0; click's own ranges let nan pass."""

    name = "float"

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or raise a usage error that names it."""
        number = click.FLOAT.convert(value, param, ctx)
        if not 0 < number < math.inf:
            self.fail(f"{value} is no finite number above 0", param, ctx)
        return number


_Command = TypeVar("_Command", bound=Callable[..., Any])
WIDTH = 100
"""Columns where the output is no terminal and COLUMNS does not say."""


def json_option(command: _Command) -> _Command:
    """Add ``--json``."""
    option = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
    return option(command)


def timeout_option(command: _Command) -> _Command:
    """Add ``--timeout``, seconds for each request to a worker."""
    option = click.option(
        "--timeout",
        type=Positive(),
        default=300.0,
        show_default=True,
        metavar="SECONDS",
        help="For each request.",
    )
    return option(command)


def scores_verbose_option(command: _Command) -> _Command:
    """Add ``--verbose`` to a command that prints a verdict on scores."""
    option = click.option(
        "-v", "--verbose", is_flag=True, help="Show positions, worst tokens, all evidence."
    )
    return option(command)


def refuse_options(names: Sequence[str], why: str) -> None:
    """Raise a usage error if one of these parameters was given, where it would go unused."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) == ParameterSource.COMMANDLINE
        if given and parameter.name in names:
            raise click.UsageError(f"{parameter.opts[0]} is {why}; leave it out")


def echo_scores(verdict: Verdict, *, verbose: bool, as_json: bool) -> int:
    """Print a verdict on scores, for people or as JSON; returns its exit code."""
    if as_json:
        echo_json(verdict.to_json())
    else:
        from layerbisect.terminal.scores import render_scores

        with page() as out:
            render_scores(verdict, out, verbose=verbose)
    return verdict.exit_code


def console(*, stderr: bool = False) -> Console:
    """Make a console on the present stdout or stderr; rich itself honours NO_COLOR."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not made.is_terminal and not os.environ.get("COLUMNS"):
        made.width = WIDTH
    return made


@contextmanager
def page() -> Iterator[Console]:
    """Yield a console on stdout for a page of data; in a file its lines have no blanks at the end.

    On an error nothing of the page is printed there.
    """
    out = console()
    if out.is_terminal:
        yield out
        return
    with out.capture() as captured:
        yield out
    lines = captured.get().split("\n")
    click.echo("\n".join(line.rstrip() for line in lines), nl=False)


@contextmanager
def warnings_as_talk() -> Iterator[None]:
    """Turn warnings about captures into lines on stderr, without Python's file and line."""
    import warnings

    from layerbisect.captures.telling import CaptureWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        yield
    for one in caught:
        if issubclass(one.category, CaptureWarning):
            click.echo(f"warning: {one.message}", err=True)
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
