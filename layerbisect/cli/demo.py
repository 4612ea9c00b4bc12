"""`layerbisect demo`: plant a fault and find it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click

from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import console, json_option, page, warnings_as_talk

if TYPE_CHECKING:
    from rich.console import Console

    from layerbisect.demo import Outcome


class _DemoCommand(click.Command):
    """Lists the faults below the options."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from layerbisect.faults import FAULTS

        with formatter.section("Faults"):
            formatter.write_dl([(f.name, f.description) for f in FAULTS.values()])


@click.command(cls=_DemoCommand, short_help="Plant a fault in one engine, and find it.")
@click.option(
    "--fault",
    default="rope-shifted",
    show_default=True,
    metavar="NAME",
    help="What to plant, one of those below; none plants nothing, list lists them.",
)
@click.option(
    "--layer", type=click.IntRange(min=0), help="Where to plant it; the middle where not given."
)
@click.option(
    "--side",
    type=click.Choice(["rollout", "trainer"]),
    default="rollout",
    show_default=True,
    help="Which engine gets it.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep model, tokens and captures in this new directory.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Use this checkpoint instead of a tiny Qwen3-MoE.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show how each point differs, too.")
@json_option
def demo(
    fault: str,
    layer: int | None,
    side: str,
    keep: Path | None,
    model: Path | None,
    verbose: bool,
    as_json: bool,
) -> int:
    """Plant a fault in one engine's layer, find it, and say whether the verdict is right.

    Two copies of a tiny Qwen3-MoE play rollout engine and trainer. It exits with 1 where the fault
    is found, with 0 where nothing was planted and nothing found, and with 2 where the verdict is
    wrong.

    \b
    Example:
      layerbisect demo
      layerbisect demo --fault softmax-scale --layer 3 --side trainer
      layerbisect demo --fault none
    """
    if fault == "list":
        _list_faults(as_json)
        return 0
    from layerbisect.demo import run_demo
    from layerbisect.progress import shown

    chosen = cast(Literal["rollout", "trainer"], side)
    with shown(console(stderr=True)) as progress, warnings_as_talk():
        outcome = run_demo(
            fault=fault, layer=layer, side=chosen, keep=keep, model=model, progress=progress
        )
    if as_json:
        echo_json(outcome.to_json())
    else:
        from layerbisect.terminal.verdict import render_verdict

        with page() as out:
            render_verdict(outcome.verdict, out, verbose=verbose)
            _render_truth(outcome, out)
    if keep is not None:
        click.echo(f"kept in {keep}", err=True)
    return outcome.exit_code


def _render_truth(outcome: Outcome, out: Console) -> None:
    from rich.text import Text

    planted = outcome.planted
    out.print()
    if planted is None:
        out.print(Text("planted: nothing"))
    else:
        where = "" if planted.layer is None else f" in layer {planted.layer}"
        out.print(
            Text(
                f"planted: `{planted.fault}`{where} on the {planted.side} side "
                f"({planted.description}), an error of {planted.operator} at {planted.point}"
            )
        )
    if outcome.right:
        what = "nothing is convicted" if planted is None else "layer, operator and side"
        out.print(Text(f"the verdict is right: {what}", style="bold green"))
    else:
        mistakes = "; ".join(outcome.mistakes())
        out.print(Text(f"the verdict is WRONG: {mistakes}", style="bold red"))


def _list_faults(as_json: bool) -> None:
    from layerbisect.faults import FAULTS

    if as_json:
        faults = [
            {"name": f.name, "operator": f.operator, "description": f.description}
            for f in FAULTS.values()
        ]
        echo_json({"schema": 1, "faults": faults})
        return
    formatter = click.HelpFormatter(width=100)
    formatter.write_dl([(f.name, f.description) for f in FAULTS.values()])
    click.echo(formatter.getvalue(), nl=False)
