"""`layerbisect doctor`: what is here, and what to do about what is not."""

from __future__ import annotations

import click

from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import json_option, page


@click.command(short_help="Say which engines are here, and what is missing.")
@json_option
def doctor(as_json: bool) -> int:
    """Say which engines, packages and GPUs are here, and which captures are possible.

    \b
    Example:
      layerbisect doctor
      layerbisect doctor --json
    """
    from rich.table import Table
    from rich.text import Text

    from layerbisect.doctor import Check, examine

    health = examine()
    if as_json:
        echo_json(health.to_json())
        return 0
    styles = {"ok": "green", "missing": "dim", "problem": "yellow"}

    def table(checks: tuple[Check, ...]) -> Table:
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(no_wrap=True, min_width=8)
        rows.add_column(no_wrap=True, min_width=18)
        rows.add_column(overflow="fold")
        for check in checks:
            text = f"{check.found}; {check.advice}" if check.advice else check.found
            rows.add_row(Text(check.state, style=styles[check.state]), check.name, Text(text))
        return rows

    with page() as out:
        out.print(table(health.checks))
        out.print()
        out.print(Text("captures possible here", style="bold"))
        out.print(table(health.captures))
    return 0
