"""`layerbisect bisect`: from two captures to a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import click

from layerbisect.captures.errors import LayerBisectError
from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import console, json_option, page

_PATH = click.Path(path_type=Path)


@click.command(short_help="From two captures to a verdict.")
@click.argument("rollout", type=_PATH)
@click.argument("trainer", type=_PATH)
@click.option(
    "--model",
    type=_PATH,
    required=True,
    metavar="DIR",
    help="Checkpoint that both engines ran: the reference is computed from it.",
)
@click.option(
    "--forced",
    type=_PATH,
    multiple=True,
    metavar="DIR",
    help="Capture of the trainer with ROLLOUT's routes forced on it, with or without their "
    "weights; says how much of the gap routing makes. May be given twice.",
)
@click.option(
    "--probe",
    type=click.Choice(["auto", "scan", "search"]),
    default="auto",
    show_default=True,
    help="Read out the carried gap at every layer boundary, or search for the steps in it.",
)
@click.option(
    "--carried",
    type=_PATH,
    metavar="FILE",
    help="Carried gap that a live trainer read out with its own layers (LAYERBISECT_TAIL), instead "
    "of probing with the reference's.",
)
@click.option(
    "--record",
    type=_PATH,
    metavar="FILE",
    help="Record of A, B and C of the same responses (`layerbisect scores collect`): shows what "
    "was done to scores after an engine had computed them.",
)
@click.option(
    "--rollout-requests",
    default="*",
    metavar="PATTERN",
    help="Use only these sequences of ROLLOUT, such as 'decode-*'.",
)
@click.option(
    "--trainer-requests",
    default="*",
    metavar="PATTERN",
    help="Use only these sequences of TRAINER.",
)
@click.option(
    "--labels",
    metavar="A,B",
    help="What to call the two sides, such as 'decode,prefill' for two captures of one engine.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show every layer, and how each point differs.")
@json_option
def bisect(
    rollout: Path,
    trainer: Path,
    model: Path,
    forced: tuple[Path, ...],
    probe: str,
    carried: Path | None,
    record: Path | None,
    rollout_requests: str,
    trainer_requests: str,
    labels: str | None,
    verbose: bool,
    as_json: bool,
) -> int:
    """Compare two captures of the same tokens and say where they part.

    ROLLOUT and TRAINER are capture directories; they may be the same directory, with patterns that
    choose different requests of it.

    \b
    Example:
      layerbisect bisect captures/rollout captures/trainer --model policy
      layerbisect bisect captures/server captures/server --model policy \\
          --rollout-requests 'decode-*' --trainer-requests 'replay-*' --labels decode,prefill
      layerbisect bisect captures/rollout captures/trainer --model policy \\
          --forced captures/forced --forced captures/forced-weights
      layerbisect bisect captures/rollout captures/trainer --model policy \\
          --record run.safetensors
    """
    names: list[str | None] = [None, None]
    if labels is not None:
        names = [name.strip() for name in labels.split(",")]
        if len(names) != 2 or not all(names) or names[0] == names[1]:
            raise LayerBisectError(
                f"--labels is {labels!r}: give two different names, as in decode,prefill"
            )
    from layerbisect.captures.store import Capture

    sides = (
        Capture.open(rollout, label=names[0], requests=rollout_requests),
        Capture.open(trainer, label=names[1], requests=trainer_requests),
    )
    if sides[0].label == sides[1].label:
        raise LayerBisectError(
            f"both captures are labelled {sides[0].label!r}; name them apart with --labels, "
            "as in --labels decode,prefill"
        )
    from layerbisect.bisect.locate import bisect as locate
    from layerbisect.progress import shown
    from layerbisect.terminal.verdict import render_verdict

    mode = cast(Literal["auto", "scan", "search"], probe)
    with shown(console(stderr=True)) as progress:
        verdict = locate(
            *sides,
            model=model,
            forced=forced,
            probe=mode,
            carried=carried,
            record=record,
            progress=progress,
        )
    if as_json:
        echo_json(verdict.to_json())
    else:
        with page() as out:
            render_verdict(verdict, out, verbose=verbose)
    return verdict.exit_code
