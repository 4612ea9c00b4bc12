"""`layerbisect scores collect`: A and B from SGLang workers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from layerbisect.captures.errors import LayerBisectError, WorkerError
from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import (
    Positive,
    Whole,
    console,
    json_option,
    refuse_options,
    timeout_option,
)
from layerbisect.wording import count

if TYPE_CHECKING:
    from layerbisect.captures.record.file import ScoreRecord

_FILE = click.Path(path_type=Path)
_OF_GENERATION = ("samples", "max_new_tokens", "temperature", "original_logprobs", "step")


@click.command(short_help="Generate once, keep A, and replay the same tokens as B.")
@click.argument("worker", metavar="URL")
@click.option(
    "--prompts",
    type=_FILE,
    metavar="FILE",
    help="Token IDs to generate from, a line each: [1, 17, 4], or "
    '{"ids": [1, 17, 4], "name": "sum"}.',
)
@click.option(
    "--saved",
    type=_FILE,
    metavar="FILE",
    help="A rollout of your own: a record, or JSON lines with the keys named above. Its A is kept "
    "and only B collected.",
)
@click.option("--out", type=_FILE, required=True, metavar="FILE", help="The record to write.")
@click.option("--samples", type=Whole(1), default=2, show_default=True)
@click.option("--max-new-tokens", type=Whole(1), default=128, show_default=True)
@click.option(
    "--temperature",
    type=Positive(),
    default=1.0,
    show_default=True,
    help="Other than 1, A is of another distribution than B, and the record says so.",
)
@click.option(
    "--original-logprobs",
    is_flag=True,
    help="The server runs with SGLANG_RETURN_ORIGINAL_LOGPROB=1: A is raw at any temperature.",
)
@click.option("--replays", type=Whole(1), default=2, show_default=True)
@click.option(
    "--worker", "workers", multiple=True, metavar="URL", help="One replay on another worker, too."
)
@click.option("--router", metavar="URL", help="As many replays through a router, too.")
@click.option(
    "--digests/--no-digests",
    default=True,
    show_default=True,
    help="Ask for checksums of the weights around each replay, which reads all of them.",
)
@click.option("--step", type=Whole(0), help="Updates of the policy before this rollout.")
@timeout_option
@json_option
def collect(
    worker: str,
    prompts: Path | None,
    saved: Path | None,
    out: Path,
    samples: int,
    max_new_tokens: int,
    temperature: float,
    original_logprobs: bool,
    replays: int,
    workers: tuple[str, ...],
    router: str | None,
    digests: bool,
    step: int | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Collect A and B from the SGLang worker at URL; whatever goes wrong later, A is kept.

    A line of --saved is one call of the model, an object with prompt_ids, response_ids and
    logprobs, and where you have them behavior_logprobs, loss_mask, name, group, turn, context,
    worker, weight_version, temperature, definition (raw, temperature, behavior or unknown) and
    step.

    \b
    Example:
      layerbisect scores collect http://127.0.0.1:30000 --prompts p.jsonl --out run.safetensors
      layerbisect scores collect http://127.0.0.1:30000 --saved rollout.jsonl --out run.safetensors
    """
    if (prompts is None) == (saved is None):
        raise LayerBisectError("give either --prompts to generate from, or --saved with an A")
    if saved is not None:
        refuse_options(_OF_GENERATION, "of generation, and --saved generates nothing")
    from layerbisect.captures.record.replay import replay
    from layerbisect.captures.record.rollout import collect as generate
    from layerbisect.captures.sglang.worker import Worker
    from layerbisect.progress import of_replays, shown

    first = Worker(worker, timeout=timeout)
    others = [Worker(url, timeout=timeout) for url in workers]
    through = None if router is None else Worker(router, timeout=timeout)
    passes = replays + len(others) + (replays if through else 0)
    again = [word for url in workers for word in ("--worker", url)]
    again += [] if router is None else ["--router", router]
    with _resumable(worker, out, again), shown(console(stderr=True)) as progress:
        if prompts is not None:
            from layerbisect.token_file import read_tokens

            asked = read_tokens(prompts)
            progress.start(f"generating {count(samples * len(asked), 'response')}", 1)
            record = generate(
                first,
                [one.ids for one in asked],
                out,
                samples=samples,
                max_new_tokens=max_new_tokens,
                replays=replays,
                workers=others,
                router=through,
                sampling={} if temperature == 1 else {"temperature": temperature},
                original_logprobs=original_logprobs,
                groups=[one.name for one in asked],
                step=step,
                digests=digests,
                progress=of_replays(progress, passes),
            )
        else:
            assert saved is not None
            record = replay(
                _open_saved(saved),
                first,
                out,
                replays=replays,
                workers=others,
                router=through,
                digests=digests,
                progress=of_replays(progress, passes),
            )
    return echo_record(record.columns, len(record), out, as_json)


def _open_saved(path: Path) -> ScoreRecord:
    from layerbisect.captures.record.file import ScoreRecord
    from layerbisect.captures.record.saved import read_rollout

    try:
        with path.open("rb") as file:
            # the length that a record's file begins with, in 8 bytes; no text has a zero in it
            binary = b"\0" in file.read(8)
    except OSError:
        binary = False
    record = binary or path.suffix == ".safetensors"
    return ScoreRecord.open(path) if record else read_rollout(path)


@contextmanager
def _resumable(worker: str, out: Path, options: list[str]) -> Iterator[None]:
    """End a failed or interrupted collection, once there is an A, with how to go on."""
    kept = ["--saved", str(out), "--out", str(out)]
    command = shlex.join(["layerbisect", "scores", "collect", worker, *kept, *options])
    try:
        yield
    except WorkerError as error:
        if out.exists():
            raise WorkerError(f"{error}: go on with `{command}`") from error
        raise
    except KeyboardInterrupt:
        if out.exists():
            click.echo(f"{out} keeps A and every whole replay: go on with `{command}`", err=True)
        raise


def echo_record(columns: tuple[str, ...], calls: int, path: Path, as_json: bool) -> int:
    """Say what a record holds now, for people or as JSON."""
    if as_json:
        echo_json({"schema": 1, "record": str(path), "calls": calls, "columns": list(columns)})
    else:
        click.echo(f"{count(calls, 'response')} with {', '.join(columns)}", err=True)
        click.echo(path)
    return 0
