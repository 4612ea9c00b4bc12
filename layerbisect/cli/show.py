"""`layerbisect show`: what a capture holds."""

from __future__ import annotations

from pathlib import Path

import click

from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import console, json_option, page


@click.command(short_help="Say what a capture holds.")
@click.argument("capture", type=click.Path(path_type=Path))
@click.option(
    "--point",
    "pattern",
    metavar="NAME",
    help="Show only points of this name or pattern, each with the range of its values.",
)
@json_option
def show(capture: Path, pattern: str | None, as_json: bool) -> int:
    """Say what the directory CAPTURE holds: engine, passes, sequences, points, problems.

    \b
    Example:
      layerbisect show captures/rollout
      layerbisect show captures/rollout --point 'layers.9.*'
    """
    from layerbisect.captures.store import Capture
    from layerbisect.captures.summary import summarize
    from layerbisect.progress import shown
    from layerbisect.terminal.capture import point_values, render_points, render_summary

    with shown(console(stderr=True)) as progress:
        progress.start("opening the capture", 1)
        opened = Capture.open(capture)
        summary = summarize(opened)
        values = None if pattern is None else point_values(opened, summary, pattern, progress)
    if values is not None:
        if as_json:
            echo_json({"schema": 1, "points": [one.to_json() for one in values]})
        else:
            with page() as out:
                render_points(values, out)
    elif as_json:
        echo_json({"schema": 1, **summary.to_json()})
    else:
        with page() as out:
            render_summary(summary, out)
    return 0
