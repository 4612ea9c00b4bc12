"""The command line: a module a command, each importing what is heavy only when it runs."""

from __future__ import annotations

import click

from layerbisect.cli.bisect import bisect
from layerbisect.cli.boundary import Boundary
from layerbisect.cli.capture import capture
from layerbisect.cli.demo import demo
from layerbisect.cli.doctor import doctor
from layerbisect.cli.replay import replay
from layerbisect.cli.report import report
from layerbisect.cli.scores import scores
from layerbisect.cli.selftest import selftest
from layerbisect.cli.show import show
from layerbisect.cli.training import training
from layerbisect.cli.weights import weights

__all__ = ["main"]


def _version(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        import layerbisect

        click.echo(f"layerbisect {layerbisect.__version__}")
        context.exit()


@click.group(
    "layerbisect",
    cls=Boundary,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Find the layer, the operator and the side behind a log-prob gap.

    The rollout engine and the trainer give the same token different log-probs: which layer, which
    operator, which side, and is it a bug or rounding?

    \b
    Exit codes:
      0  the sides agree: there is no gap, or it is rounding
      1  they diverge, and the verdict says where
      2  it could not be judged: bad usage or input, unstable, inconclusive

    \b
    Example:
      layerbisect demo
      layerbisect selftest
      layerbisect scores judge run.safetensors
      layerbisect capture --model policy --tokens answers.jsonl --out captures/trainer
      layerbisect bisect captures/rollout captures/trainer --model policy
      layerbisect replay captures/rollout --model policy --layer 9 --operator attention
    """


for _command in (
    demo,
    selftest,
    scores,
    weights,
    capture,
    show,
    bisect,
    replay,
    report,
    training,
    doctor,
):
    main.add_command(_command)
