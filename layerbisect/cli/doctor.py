"""`layerbisect doctor`: what is here, what can be done, and what would break a capture."""

from __future__ import annotations

import os

import click

from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import Positive, json_option, page


@click.command(
    short_help="Say what is here, and what would break a capture.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.option("--server", metavar="URL", help="Ask a running SGLang server what it runs with.")
@click.option(
    "--timeout",
    type=Positive(),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="For the server's answer.",
)
@json_option
def doctor(command: tuple[str, ...], server: str | None, timeout: float, as_json: bool) -> int:
    """Say which engines, packages and GPUs are here, and which captures are possible.

    With COMMAND, which starts an SGLang server or a Megatron-core job (of miles and slime as well),
    say flag by flag what would hide points or change numbers, and what to do. It is not started.

    \b
    Example:
      layerbisect doctor
      layerbisect doctor -- python -m sglang.launch_server --model-path policy --tp-size 8
      layerbisect doctor -- torchrun train.py --tensor-model-parallel-size 2 ...
      layerbisect doctor --server http://127.0.0.1:30000
    """
    from layerbisect.doctor.command import judge_command
    from layerbisect.doctor.health import examine
    from layerbisect.terminal.doctor import render_footer, render_health, render_judged

    judged = {}
    if command:
        judged["command"] = judge_command(command, os.environ)
    if server is not None:
        from layerbisect.doctor.server import judge_server

        judged["server"] = judge_server(server, timeout)
    health = examine(os.environ)
    if as_json:
        said = {name: one.to_json() for name, one in judged.items()}
        echo_json({**health.to_json(), "command": None, "server": None, **said})
        return 0
    with page() as out:
        render_health(health, out)
        for name, one in judged.items():
            what = "the command" if name == "command" else f"the server at {server}"
            render_judged(one, out, what)
        sections = (health.checks, health.captures, health.replays, health.environment)
        shown = (*sections, *(one.checks for one in judged.values()))
        render_footer((check for section in shown for check in section), out)
    return 0
