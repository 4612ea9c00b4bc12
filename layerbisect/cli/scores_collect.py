"""`layerbisect scores collect` and `trainer`: A and B from SGLang workers, C from a model."""

from __future__ import annotations

from pathlib import Path

import click

from layerbisect.captures.errors import LayerBisectError
from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import console, json_option

_FILE = click.Path(path_type=Path)


@click.command(short_help="Generate once, keep A, and replay the same tokens as B.")
@click.argument("worker", metavar="URL")
@click.option(
    "--prompts",
    type=_FILE,
    metavar="FILE",
    help="JSON lines of token IDs to generate from.",
)
@click.option(
    "--saved",
    type=_FILE,
    metavar="FILE",
    help="A rollout of your own, as JSON lines or as a record: its A is kept and only B collected.",
)
@click.option("--out", type=_FILE, required=True, metavar="FILE", help="The record to write.")
@click.option("--samples", type=click.IntRange(1), default=2, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option(
    "--temperature",
    type=float,
    default=1.0,
    show_default=True,
    help="Other than 1, A is of another distribution than B, and the record says so.",
)
@click.option(
    "--original-logprobs",
    is_flag=True,
    help="The server runs with SGLANG_RETURN_ORIGINAL_LOGPROB=1: A is raw at any temperature.",
)
@click.option("--replays", type=click.IntRange(1), default=2, show_default=True)
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
@click.option("--step", type=int, help="Updates of the policy before this rollout.")
@click.option(
    "--timeout", type=float, default=300.0, show_default=True, metavar="SECONDS", help="A request."
)
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

    \b
    Example:
      layerbisect scores collect http://127.0.0.1:30000 --prompts p.jsonl --out run.safetensors
      layerbisect scores collect http://127.0.0.1:30000 --saved rollout.jsonl --out run.safetensors
    """
    if (prompts is None) == (saved is None):
        raise LayerBisectError("give either --prompts to generate from, or --saved with an A")
    from layerbisect.captures.record.replay import replay
    from layerbisect.captures.record.rollout import collect as generate
    from layerbisect.captures.sglang.worker import Worker
    from layerbisect.progress import shown

    first = Worker(worker, timeout=timeout)
    others = [Worker(url, timeout=timeout) for url in workers]
    through = None if router is None else Worker(router, timeout=timeout)
    passes = replays + len(others) + (replays if through else 0)
    with shown(console(stderr=True)) as progress:
        if prompts is not None:
            from layerbisect.token_file import read_tokens

            asked = read_tokens(prompts)
            progress.start("generating and replaying", passes)
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
                progress=progress.advance,
            )
        else:
            assert saved is not None
            from layerbisect.captures.record.file import ScoreRecord
            from layerbisect.captures.record.saved import read_rollout

            open_saved = ScoreRecord.open if saved.suffix == ".safetensors" else read_rollout
            progress.start("replaying", passes)
            record = replay(
                open_saved(saved),
                first,
                out,
                replays=replays,
                workers=others,
                router=through,
                digests=digests,
                progress=progress.advance,
            )
    return _said(record.columns, len(record), out, as_json)


@click.command(short_help="Score a record's responses with a transformers model: C.")
@click.argument("record", type=_FILE)
@click.option("--model", type=_FILE, required=True, metavar="DIR", help="Checkpoint directory.")
@click.option("--repeats", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Compute in this; the checkpoint's own dtype where not given.",
)
@click.option(
    "--attention", type=click.Choice(["eager", "sdpa"]), default="sdpa", show_default=True
)
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="Such as cuda:0.")
@click.option("--batch-size", type=click.IntRange(1), default=1, show_default=True)
@click.option("--weight-version", help="The state of the weights, by the trainer's own count.")
@json_option
def trainer(
    record: Path,
    model: Path,
    repeats: int,
    dtype: str | None,
    attention: str,
    device: str,
    batch_size: int,
    weight_version: str | None,
    as_json: bool,
) -> int:
    """Add C0, C1, ... and C.grad, the gradient-enabled forward, to the file RECORD.

    For another trainer, call `layerbisect.captures.record.trainer.score` in its own process with a
    function that scores.

    \b
    Example:
      layerbisect scores trainer run.safetensors --model policy
    """
    from layerbisect.captures.record.file import ScoreRecord
    from layerbisect.captures.record.trainer import score
    from layerbisect.loading import load_model
    from layerbisect.progress import shown

    opened = ScoreRecord.open(record)
    with shown(console(stderr=True)) as progress:
        progress.start("loading the model", 1)
        # C.grad is the forward as training runs it
        loaded = load_model(model, dtype=dtype, attention=attention, device=device).train()
        progress.start("scoring responses", 1)
        scored = score(
            opened,
            loaded,
            record,
            repeats=repeats,
            batch_size=batch_size,
            weight_version=weight_version,
            progress=progress.advance,
        )
    return _said(scored.columns, len(scored), record, as_json)


def _said(columns: tuple[str, ...], calls: int, path: Path, as_json: bool) -> int:
    if as_json:
        echo_json({"schema": 1, "record": str(path), "calls": calls, "columns": list(columns)})
    else:
        click.echo(f"{calls} responses with {', '.join(columns)}", err=True)
        click.echo(path)
    return 0
