"""`layerbisect weights`: whether both sides hold the same weights, and how they differ."""

from __future__ import annotations

from pathlib import Path

import click

from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import console, json_option, page

_FOLDER = click.Path(path_type=Path)


@click.command(short_help="Compare what both sides hold, tensor by tensor.")
@click.argument("rollout", type=_FOLDER)
@click.argument("trainer", type=_FOLDER)
@click.option(
    "--previous",
    type=_FOLDER,
    metavar="DIR",
    help="What both sides held before, such as the checkpoint before the last update: with it a "
    "side that is stale or off can be told.",
)
@click.option("-v", "--verbose", is_flag=True, help="Name every tensor that differs.")
@json_option
def weights(
    rollout: Path, trainer: Path, previous: Path | None, verbose: bool, as_json: bool
) -> int:
    """Compare the weights that two sides hold, by the names that a checkpoint has for them.

    ROLLOUT and TRAINER are checkpoint directories or weight snapshots. An SGLang server that was
    started with LAYERBISECT_WEIGHTS=DIR writes a snapshot when it is asked for checksums: DIR/000
    at first, and 001, ... where its weights have changed since, so that the newest is what it holds
    (`layerbisect scores` asks, too). In a trainer
    `layerbisect.captures.weights.snapshot.save_weights(model, DIR)` writes one.

    \b
    Example:
      curl -X POST localhost:30000/weights_checker -H 'Content-Type: application/json' \\
          -d '{"action": "checksum"}'
      layerbisect weights weights/rollout/000 policy-step-8 --previous policy-step-7
    """
    from layerbisect.bisect.weight_diff.compare import compare
    from layerbisect.progress import shown
    from layerbisect.terminal.weights import render_weights

    with shown(console(stderr=True)) as progress:
        report = compare(rollout, trainer, previous=previous, progress=progress)
    if as_json:
        echo_json(report.to_json())
    else:
        with page() as out:
            render_weights(report, out, verbose=verbose)
    return report.exit_code
