"""`layerbisect scores compare`: two runs side by side, and a control's range."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from layerbisect.captures.errors import LayerBisectError
from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import json_option, page

_RECORDS = click.Path(path_type=Path)


@click.command(short_help="Put a run before a fix beside the run after it.")
@click.argument("before", type=_RECORDS)
@click.argument("after", type=_RECORDS)
@click.option(
    "--control",
    type=_RECORDS,
    multiple=True,
    metavar="RECORD",
    help="A run without the fault, whose range the fixed run should be back in; may be repeated.",
)
@json_option
def compare(before: Path, after: Path, control: tuple[Path, ...], as_json: bool) -> int:
    """Put the run BEFORE a fix beside the run AFTER it, measure by measure and step by step.

    Each is a record file, or a directory with one file a step. Exit code 0: every measure is within
    the control's range. 1: some are not. 2: without a control, or with fewer than 4 prompts in a
    run, nothing can be said to be back.

    \b
    Example:
      layerbisect scores compare fault.safetensors fixed.safetensors --control clean.safetensors
    """
    from layerbisect.bisect.scores.side_by_side import compare_runs
    from layerbisect.captures.record.file import open_all
    from layerbisect.terminal.compare import render_comparison

    if any(path.resolve() in (before.resolve(), after.resolve()) for path in control):
        raise LayerBisectError(
            "--control is one of the two runs itself; name a run without a fault"
        )
    runs = open_all([before]), open_all([after])
    comparison = compare_runs(*runs, open_all(control) if control else ())
    if as_json:
        echo_json({"schema": 1, "status": comparison.status, **dataclasses.asdict(comparison)})
    else:
        with page() as out:
            render_comparison(comparison, out)
    return {"within": 0, "out of range": 1, "too few": 2, "no control": 2}[comparison.status]
