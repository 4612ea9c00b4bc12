"""`layerbisect scores trainer`: C from a transformers model."""

from __future__ import annotations

from pathlib import Path

import click

from layerbisect.cli.options import Whole, console, json_option
from layerbisect.cli.scores_collect import echo_record

_FILE = click.Path(path_type=Path)


@click.command(short_help="Score a record's responses with a transformers model: C.")
@click.argument("record", type=_FILE)
@click.option("--model", type=_FILE, required=True, metavar="DIR", help="Checkpoint directory.")
@click.option("--repeats", type=Whole(1), default=2, show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Compute in this; the checkpoint's own dtype where not given.",
)
@click.option(
    "--attention", type=click.Choice(["eager", "sdpa"]), default="sdpa", show_default=True
)
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="Such as cuda:0.")
@click.option("--batch-size", type=Whole(1), default=1, show_default=True)
@click.option("--weight-version", help="The state of the weights, by the trainer's own count.")
@json_option
def trainer(
    record: Path,
    model: Path,
    repeats: int,
    dtype: str | None,
    attention: str,
    device: str,
    batch_size: int,
    weight_version: str | None,
    as_json: bool,
) -> int:
    """Add C0, C1, ... and C.grad, the gradient-enabled forward, to the file RECORD.

    For another trainer, call `layerbisect.captures.record.trainer.score` in its own process with a
    function that scores.

    \b
    Example:
      layerbisect scores trainer run.safetensors --model policy
    """
    from layerbisect.captures.record.file import ScoreRecord
    from layerbisect.captures.record.trainer import score
    from layerbisect.loading import load_model
    from layerbisect.progress import shown

    opened = ScoreRecord.open(record)
    with shown(console(stderr=True)) as progress:
        progress.start("loading the model", 1)
        # C.grad is the forward as training runs it
        loaded = load_model(model, dtype=dtype, attention=attention, device=device).train()
        progress.start("scoring responses", 1)
        scored = score(
            opened,
            loaded,
            record,
            repeats=repeats,
            batch_size=batch_size,
            weight_version=weight_version,
            progress=progress.advance,
        )
    return echo_record(scored.columns, len(scored), record, as_json)
