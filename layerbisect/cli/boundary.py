"""Where errors end: one sentence on stderr, and an exit code that never mixes up two meanings.

0 agree, 1 divergent, 2 could not judge, 130 interrupted. Python and click use 1 for an error, so
nothing may leave a command uncaught.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

from layerbisect.captures.errors import LayerBisectError

COULD_NOT_JUDGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class Boundary(click.Group):
    """A group of commands that each return their exit code, or None for 0."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Keep the order in which the commands were added."""
        return list(self.commands)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit with its code."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        arguments = list(sys.argv[1:] if args is None else args)
        json_of: str | None = None
        if "--json" in arguments:
            json_of = next((one for one in arguments if not one.startswith("-")), "")
        try:
            code = super().main(
                arguments, prog_name or "layerbisect", complete_var, standalone_mode=False, **extra
            )
            sys.stdout.flush()
        except click.Abort:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)
        except (BrokenPipeError, SystemExit):
            # the reader has left (`layerbisect show ... | head`): nothing more can be said to it;
            # this is also the one case in which click itself exits, with the code of divergence
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(BROKEN_PIPE)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(COULD_NOT_JUDGE)
        except click.UsageError as error:
            hint = f"see `{error.ctx.command_path} --help`" if error.ctx else ""
            fail(error.format_message().removesuffix("."), hint, json_of)
        except click.ClickException as error:
            fail(error.format_message(), "", json_of)
        except LayerBisectError as error:
            fail(str(error), "", json_of)
        except OSError as error:
            what = error.strerror or str(error) or type(error).__name__
            fail(f"{what}: {error.filename}" if error.filename else what, "", json_of)
        except MemoryError:
            fail("out of memory", "compare fewer sequences, or fewer points", json_of)
        except Exception as error:
            traceback.print_exc()
            fail(
                f"internal error: {type(error).__name__}: {error}",
                "this is a fault of layerbisect: please report it with the lines above",
                json_of,
            )
        sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, hint: str, json_of: str | None) -> NoReturn:
    """Say why nothing could be judged, for people and as the JSON of a command, and exit.

    ``json_of`` names the command, and is None where no JSON is wanted. That of `replay` holds no
    replays; all others answer as a verdict.
    """
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    if json_of == "replay":
        echo_json({"schema": 1, "error": message, "hint": hint, "replays": []})
    elif json_of is not None:
        from layerbisect.bisect.verdict import Coverage, CoveredRows, Points, Verdict

        verdict = Verdict(
            status="inconclusive",
            gap=None,
            culprits=(),
            ruled_out=(),
            rounding_budget=None,
            coverage=Coverage(Points(0, ()), CoveredRows(0, 0)),
            next=hint,
            reasons=(message,),
        )
        echo_json(verdict.to_json())
    sys.exit(COULD_NOT_JUDGE)


def echo_json(value: Any) -> None:
    """Write an object to stdout as strict JSON."""
    click.echo(json_text(value))


def json_text(value: Any, newline: str = "\n") -> str:
    """Write an object as strict JSON; lists of nothing but numbers take one line each.

    ``newline`` begins a line, and holds the indentation that the object stands at.
    """
    inner = f"{newline}  "
    if isinstance(value, Mapping) and value:
        # a key is what json makes of it, and text in any case
        keys = [key if isinstance(key, str) else json.dumps(key) for key in value]
        entries = [
            f"{json.dumps(key, ensure_ascii=False)}: {json_text(one, inner)}"
            for key, one in zip(keys, value.values(), strict=True)
        ]
        return f"{{{inner}{f',{inner}'.join(entries)}{newline}}}"
    if isinstance(value, list | tuple) and not all(map(_is_number, value)):
        return f"[{inner}{f',{inner}'.join(json_text(one, inner) for one in value)}{newline}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
