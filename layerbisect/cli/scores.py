"""`layerbisect scores`: three scores of the same tokens, and what they say."""

from __future__ import annotations

import click

from layerbisect.cli.scores_carry import carry
from layerbisect.cli.scores_collect import collect
from layerbisect.cli.scores_compare import compare
from layerbisect.cli.scores_judge import judge
from layerbisect.cli.scores_trainer import trainer


class _InOrder(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Keep the order in which the commands are used."""
        return list(self.commands)


@click.group(cls=_InOrder, short_help="Collect and judge three scores: A, B and C.")
def scores() -> None:
    """Score the same tokens three times, and say where to look.

    A is recorded at generation, B is the rollout engine's prefill replay, C the frozen trainer's
    forward. A record file keeps all of them and is never overwritten: it only gains columns.

    \b
    Example:
      layerbisect scores collect http://127.0.0.1:30000 --prompts p.jsonl --out run.safetensors
      layerbisect scores trainer run.safetensors --model policy
      layerbisect scores judge run.safetensors
    """


for _command in (collect, trainer, judge, compare, carry):
    scores.add_command(_command)
