"""`layerbisect scores carry`: a saved response carried across a weight update."""

from __future__ import annotations

from pathlib import Path

import click

from layerbisect.captures.errors import RecordError
from layerbisect.cli.options import (
    Positive,
    console,
    echo_scores,
    json_option,
    scores_verbose_option,
    timeout_option,
)

_FILE = click.Path(path_type=Path)


@click.command(short_help="Carry saved responses across a weight update: was it installed?")
@click.argument("old", type=_FILE)
@click.argument("worker", metavar="URL")
@click.option(
    "--model", type=_FILE, required=True, metavar="DIR", help="The trainer's weights after it."
)
@click.option("--out", type=_FILE, required=True, metavar="FILE", help="The new record to write.")
@click.option(
    "--install",
    is_flag=True,
    help="Let the worker load --model first; without it, the update is your trainer's to make.",
)
@click.option(
    "--weight-version",
    metavar="NAME",
    help="What the new weights are called, or with --install are to be called.",
)
@click.option(
    "--tolerance",
    type=Positive(),
    default=0.01,
    show_default=True,
    metavar="NAT",
    help="Mean absolute difference that is accepted.",
)
@timeout_option
@scores_verbose_option
@json_option
def carry(
    old: Path,
    worker: str,
    model: Path,
    out: Path,
    install: bool,
    weight_version: str | None,
    tolerance: float,
    timeout: float,
    verbose: bool,
    as_json: bool,
) -> int:
    """Score the responses of OLD, which has B0 and C0 at the old weights, at the new ones.

    The worker at URL replays them twice and the model scores them twice. Where one side scores as
    it did before, it has the old weights still. A is of the old weights, and not in the new record.

    \b
    Example:
      layerbisect scores carry t0.safetensors http://127.0.0.1:30000 --model policy-1 \\
          --out t1.safetensors --weight-version 1
    """
    from layerbisect.bisect.scores.update import judge_update
    from layerbisect.captures.record.file import ScoreRecord
    from layerbisect.captures.record.replay import replay
    from layerbisect.captures.record.rollout import new_file
    from layerbisect.captures.record.trainer import score
    from layerbisect.captures.sglang.worker import Worker
    from layerbisect.loading import load_model
    from layerbisect.progress import of_replays, shown

    before = ScoreRecord.open(old)
    for column in ("B0", "C0"):
        if column not in before.columns:
            raise RecordError(
                f"{old} has no column {column}; give a record that was scored on both sides before "
                "the update"
            )
    rollout = Worker(worker, timeout=timeout)
    new_file(out)
    with shown(console(stderr=True)) as progress:
        # a checkpoint that is not whole ends a worker that loads it
        progress.start("loading the model", 1)
        loaded = load_model(model)
        if install:
            progress.start("installing the weights", 1)
            rollout.load_weights(model.absolute(), weight_version)
        served = rollout.weight_version()
        carried = replay(
            before.without(*before.columns),
            rollout,
            out,
            weight_version=served,
            batches=before.info.columns["B0"].batches,
            progress=of_replays(progress, 2),
        )
        progress.start("scoring responses", 1)
        carried = score(
            carried,
            loaded,
            out,
            grad=False,
            weight_version=weight_version,
            progress=progress.advance,
        )
    if weight_version is not None and served not in (None, weight_version):
        click.echo(
            f"note: {rollout.url} calls its weights {served!r} and not {weight_version!r}; they "
            "were scored as they are",
            err=True,
        )
    verdict = judge_update(before, carried, tolerance=tolerance)
    return echo_scores(verdict, verbose=verbose, as_json=as_json)
