"""`layerbisect training`: the frozen forward against the training forward of one module."""

from __future__ import annotations

from pathlib import Path

import click

from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import json_option, page

_FOLDER = click.Path(path_type=Path)


@click.command(short_help="Compare a frozen with a training forward of one module.")
@click.argument("frozen", type=_FOLDER)
@click.argument("training", type=_FOLDER)
@click.option(
    "--recompute",
    is_flag=True,
    help="Demand that a recomputation was seen: without one nothing is judged.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show every point and every layer.")
@json_option
def training(frozen: Path, training: Path, recompute: bool, verbose: bool, as_json: bool) -> int:
    """Compare the forward that scored C with the one that a loss is made of.

    FROZEN and TRAINING are captures of one trainer on the same tokens, both before the optimizer's
    step: the first in eval mode without gradients, the second in training mode with gradients and,
    where activations are recomputed, with its backward.

    \b
    Example:
      layerbisect capture --model policy --tokens answers.jsonl --out captures/frozen --points all
      layerbisect capture --model policy --tokens answers.jsonl --out captures/training \\
          --points all --forward training --recompute
      layerbisect training captures/frozen captures/training
    """
    from layerbisect.bisect.training_forward import compare_training
    from layerbisect.terminal.training import render_training

    verdict = compare_training(frozen, training, recompute=recompute)
    if as_json:
        echo_json(verdict.to_json())
    else:
        with page() as out:
            render_training(verdict, out, verbose=verbose)
    return verdict.exit_code
