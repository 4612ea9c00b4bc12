"""`layerbisect selftest`: see on this machine that planted faults are found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click

from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import console, json_option, warnings_as_talk

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from layerbisect.progress import ConsoleProgress

_FOLDER = click.Path(path_type=Path)


@click.command(short_help="Plant ten faults here, and see that each is found.")
@click.option(
    "--model", type=_FOLDER, metavar="DIR", help="Use this checkpoint instead of a tiny Qwen3-MoE."
)
@click.option(
    "--engine",
    type=click.Choice(["transformers", "sglang"]),
    default="transformers",
    show_default=True,
    help="Who plays the rollout: sglang starts a server of its own for it. The trainer is "
    "transformers.",
)
@click.option(
    "--device", metavar="NAME", help="Such as cuda:0 or cpu; cuda if there is one, else cpu."
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Compute in this; the checkpoint's own dtype where not given.",
)
@click.option(
    "--keep",
    type=_FOLDER,
    metavar="DIR",
    help="Keep model, tokens and captures in this new directory.",
)
@json_option
def selftest(
    model: Path | None,
    engine: str,
    device: str | None,
    dtype: str | None,
    keep: Path | None,
    as_json: bool,
) -> int:
    """Plant ten faults one after another, and see whether each is found on this machine.

    A clean pair of engines comes first, and must not be accused. Then each verdict must name the
    fault's layer, operator and side, and nobody else. Takes about a minute with the tiny model, and
    with a checkpoint as long as eleven verdicts on 256 tokens do.

    \b
    Exit codes:
      0  all were found, and the clean pair was not accused
      1  a verdict is wrong
      2  something could not be run

    \b
    Example:
      layerbisect selftest
      layerbisect selftest --engine sglang --model policy
      layerbisect selftest --keep selftest --json
    """
    from layerbisect.progress import shown
    from layerbisect.selftest import run_selftest
    from layerbisect.terminal.selftest import SelfTestPage

    talk = console(stderr=True)

    def watched() -> AbstractContextManager[ConsoleProgress]:
        return shown(talk)

    # lines come as they are judged; data comes once, at the end
    page = SelfTestPage(console(stderr=as_json))
    with warnings_as_talk():
        done = run_selftest(
            watched,
            model=model,
            engine=cast(Literal["transformers", "sglang"], engine),
            device=device,
            dtype=dtype,
            keep=keep,
            begin=page.begin,
            tell=page.tell,
        )
    page.end(done, keep, model)
    if as_json:
        echo_json(done.to_json())
    if keep is not None:
        click.echo(f"kept in {keep}", err=True)
    return done.exit_code
