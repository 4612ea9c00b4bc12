"""`layerbisect scores trainer`: C from a transformers model, or from a trainer's capture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from layerbisect.captures.errors import LayerBisectError
from layerbisect.cli.options import (
    Whole,
    console,
    json_option,
    refuse_options,
    warnings_as_talk,
)
from layerbisect.cli.scores_collect import echo_record

if TYPE_CHECKING:
    from layerbisect.captures.record.file import ScoreRecord

_FILE = click.Path(path_type=Path)
_OF_A_MODEL = ("repeats", "dtype", "attention", "device", "batch_size")


@click.command(short_help="Score a record's responses with the trainer: C.")
@click.argument("record", type=_FILE)
@click.option("--model", type=_FILE, metavar="DIR", help="Checkpoint of a transformers model.")
@click.option(
    "--capture",
    type=_FILE,
    metavar="DIR",
    help="Capture of a trainer, such as a Megatron-core job, that scored the record's tokens.",
)
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
    model: Path | None,
    capture: Path | None,
    repeats: int,
    dtype: str | None,
    attention: str,
    device: str,
    batch_size: int,
    weight_version: str | None,
    as_json: bool,
) -> int:
    """Add C0, C1, ... to the file RECORD, and with --model C.grad, the gradient-enabled forward.

    From --capture there are as many columns as it has scores of every response token: two where
    the trainer scored the batch twice.

    For a trainer that is neither, call `layerbisect.captures.record.trainer.score` in its own
    process with a function that scores.

    \b
    Example:
      layerbisect scores trainer run.safetensors --model policy
      layerbisect scores trainer run.safetensors --capture captures/trainer
    """
    if (model is None) == (capture is None):
        raise LayerBisectError(
            "give either --model, a transformers checkpoint, or --capture, what a trainer's job "
            "wrote"
        )
    from layerbisect.captures.record.file import ScoreRecord

    opened = ScoreRecord.open(record)
    if capture is not None:
        refuse_options(
            _OF_A_MODEL, "of the forward that --model runs, and --capture holds one that ran"
        )
        scored = _from_capture(opened, capture, record, weight_version)
        return echo_record(scored.columns, len(scored), record, as_json)
    assert model is not None
    from layerbisect.captures.record.trainer import score
    from layerbisect.loading import load_model
    from layerbisect.progress import shown

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


def _from_capture(
    record: ScoreRecord, capture: Path, path: Path, weight_version: str | None
) -> ScoreRecord:
    from layerbisect.captures.record.captured import score_from_capture

    with warnings_as_talk():
        return score_from_capture(record, capture, path, weight_version=weight_version)
