"""`layerbisect replay`: run operators on what an engine gave them, by every implementation."""

from __future__ import annotations

import os
from pathlib import Path

import click

from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import Whole, console, json_option, page

_PATH = click.Path(path_type=Path)
_OPERATORS = "norm, linear, rope, attention, router, experts, combine, residual or head"


@click.command(short_help="Run an operator on its captured input, by every implementation.")
@click.argument("source", type=_PATH)
@click.option(
    "--model",
    type=_PATH,
    metavar="DIR",
    help="Checkpoint that the captured engine ran; a bundle needs none.",
)
@click.option(
    "--layer",
    type=int,
    metavar="N",
    help="Replay the operators of this layer; the final norm and the head where not given.",
)
@click.option("--operator", metavar="NAME", help=f"Only {_OPERATORS}.")
@click.option("--point", metavar="NAME", help="Only what makes this point.")
@click.option(
    "--implementation",
    "implementations",
    multiple=True,
    metavar="NAME",
    help="Run only this one. May be given several times; reference is the low-precision reference.",
)
@click.option(
    "--deterministic",
    type=click.Choice(["both"]),
    help="Compare fast and deterministic forms of each operator: what changes, and its cost.",
)
@click.option(
    "--requests",
    default="*",
    metavar="PATTERN",
    help="Use only these sequences of the capture, such as 'decode-*'.",
)
@click.option(
    "--rows",
    type=Whole(min=1),
    metavar="N",
    help="Take no more rows than this, 4096 by default and 512 on a CPU; where rows attend, whole "
    "sequences and at least one.",
)
@click.option(
    "--resume",
    type=_PATH,
    metavar="DIR",
    help="Keep what is done in this directory, and go on from there; what crashed is left out.",
)
@click.option(
    "--export",
    type=_PATH,
    metavar="DIR",
    help="Write the operator bundle and a repro.py that needs torch alone to this new directory.",
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Show worst rows, distances in ulp, all of the engine."
)
@json_option
def replay(
    source: Path,
    model: Path | None,
    layer: int | None,
    operator: str | None,
    point: str | None,
    implementations: tuple[str, ...],
    deterministic: str | None,
    requests: str,
    rows: int | None,
    resume: Path | None,
    export: Path | None,
    device: str,
    verbose: bool,
    as_json: bool,
) -> int:
    """Run operators on what an engine gave them, and judge what it and others make of it.

    SOURCE is a capture directory, or an operator bundle that --export wrote. Everything is measured
    against float64 on the same input, as a multiple of what a low-precision reference loses.

    \b
    Exit codes:
      0  rounding explains what the engine returned
      1  an operator of the engine errs beyond rounding
      2  nothing could be judged

    \b
    Example:
      layerbisect replay captures/rollout --model policy --layer 9 --operator attention
      layerbisect replay captures/rollout --model policy --layer 9 --deterministic both
      layerbisect replay captures/rollout --model policy --layer 9 --operator attention \\
          --export for-the-kernels-owner
      layerbisect replay for-the-kernels-owner/bundle.safetensors --implementation torch
    """
    from layerbisect.bisect.bundles import ROWS
    from layerbisect.bisect.chosen_bundles import choose
    from layerbisect.bisect.replay_bundles import device_of, replay_all, switched
    from layerbisect.bisect.verdict import plain
    from layerbisect.export import check_export, write_export
    from layerbisect.kernels.replay.deterministic import deterministic_table
    from layerbisect.progress import shown
    from layerbisect.terminal.replay import render_replays

    where = device_of(device)
    if where == "cpu":
        # Triton reads it when it is imported; there is nothing else to run its kernels on
        os.environ.setdefault("TRITON_INTERPRET", "1")
    with shown(console(stderr=True)) as progress:
        progress.start("reading what was captured", 1)
        chosen = choose(
            source,
            model=model,
            layer=layer,
            operator=operator,
            point=point,
            requests=requests,
            # an interpreted kernel takes seconds for what a GPU does in a blink
            rows=rows or (512 if where == "cpu" else ROWS),
        )
        if export is not None:
            check_export(export, chosen.bundles, implementations, where)
        replays = replay_all(
            chosen.bundles,
            implementations=implementations
            or (switched(chosen.bundles, where) if deterministic else ()),
            device=where,
            resume=resume,
            progress=progress,
        )
        written: list[Path] = []
        if export is not None:
            written = write_export(export, chosen.bundles, replays, implementations, where)
    pairs = deterministic_table(replays) if deterministic else None
    if as_json:
        echo_json(
            plain(
                {
                    "schema": 1,
                    "replays": [one.to_json() for one in replays],
                    "left_out": chosen.left_out,
                    "deterministic": None if pairs is None else [pair.to_json() for pair in pairs],
                    "exported": [str(path) for path in written],
                }
            )
        )
    else:
        with page() as out:
            render_replays(replays, chosen.left_out, out, pairs=pairs, verbose=verbose)
        for path in written:
            click.echo(f"wrote {path}", err=True)
    codes = {one.exit_code for one in replays}
    return 1 if 1 in codes else min(codes)
