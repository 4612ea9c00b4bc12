"""`layerbisect scores judge`: from A, B and C to where to look."""

from __future__ import annotations

from pathlib import Path

import click

from layerbisect.cli.options import console, echo_scores, json_option, scores_verbose_option


@click.command(short_help="Say which of the scores differs, how, and where to look.")
@click.argument("records", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--tolerance",
    type=float,
    default=0.01,
    show_default=True,
    metavar="NAT",
    help="Mean absolute difference that is accepted.",
)
@click.option(
    "--repeat-tolerance",
    type=float,
    metavar="NAT",
    help="How far a token's repeats may differ before it has moved; --tolerance where not given.",
)
@click.option(
    "--clip",
    type=float,
    default=0.2,
    show_default=True,
    metavar="EPSILON",
    help="The loss's clipping range, to say what the gap does to training.",
)
@scores_verbose_option
@json_option
def judge(
    records: tuple[Path, ...],
    tolerance: float,
    repeat_tolerance: float | None,
    clip: float,
    verbose: bool,
    as_json: bool,
) -> int:
    """Judge the scores in RECORDS, files or directories of files, as one run.

    Records of several steps are judged step by step: the verdict is of the first that does not
    agree.

    \b
    Example:
      layerbisect scores judge run.safetensors
      layerbisect scores judge step-0.safetensors step-1.safetensors --tolerance 0.02 --json
    """
    from layerbisect.bisect.scores.judge import judge as judge_records
    from layerbisect.captures.record.file import open_all
    from layerbisect.progress import shown

    with shown(console(stderr=True)) as progress:
        progress.start("opening records", 1)
        opened = open_all(records)
        verdict = judge_records(
            opened,
            tolerance=tolerance,
            repeat_tolerance=repeat_tolerance,
            epsilon=clip,
            progress=progress,
        )
    return echo_scores(verdict, verbose=verbose, as_json=as_json)
