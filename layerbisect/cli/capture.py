"""`layerbisect capture`: run a transformers model over a file of token IDs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layerbisect.captures.errors import CaptureError, LayerBisectError
from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import console, json_option, warnings_as_talk

if TYPE_CHECKING:
    import torch

    from layerbisect.captures.transformers_capture import ModelCapture
    from layerbisect.progress import ConsoleProgress
    from layerbisect.token_file import TokenSequence

_FOLDER = click.Path(path_type=Path)


@click.command(short_help="Capture a transformers model over given tokens.")
@click.option("--model", type=_FOLDER, required=True, metavar="DIR", help="Checkpoint to run.")
@click.option(
    "--tokens",
    type=_FOLDER,
    required=True,
    metavar="FILE",
    help="JSON lines: a list of token IDs each, or "
    '{"ids": [...], "name": "a7", "prompt_length": 12}.',
)
@click.option("--out", type=_FOLDER, required=True, metavar="DIR", help="New directory to write.")
@click.option(
    "--points",
    default="coarse",
    show_default=True,
    metavar="PATTERNS",
    help="coarse (layer boundaries and scores), all, layers.9, or patterns such as "
    "'layers.*.attn.out', separated by commas.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Compute in this; the checkpoint's own dtype where not given.",
)
@click.option(
    "--attention", type=click.Choice(["eager", "sdpa"]), default="sdpa", show_default=True
)
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="Such as cuda:0.")
@click.option(
    "--label",
    help="What to call this side; trainer where not given, rollout with --decode-from-prompt.",
)
@click.option(
    "--decode-from-prompt",
    is_flag=True,
    help="Prefill prompt_length tokens and decode the others over a KV cache, as a rollout does.",
)
@click.option(
    "--routes",
    type=_FOLDER,
    metavar="DIR",
    help="Use the experts of this capture (with its expert_ids) for the tokens that both have.",
)
@click.option(
    "--route-weights", is_flag=True, help="With --routes: use its experts' weights as well."
)
@click.option(
    "--forward",
    type=click.Choice(["frozen", "training"]),
    default="frozen",
    show_default=True,
    help="frozen: eval mode, no gradients. training: train mode, with gradients and the backward "
    "of the mean log-prob; for `layerbisect training`.",
)
@click.option(
    "--recompute",
    is_flag=True,
    help="With --forward training: compute each layer again in the backward.",
)
@json_option
def capture(
    model: Path,
    tokens: Path,
    out: Path,
    points: str,
    dtype: str | None,
    attention: str,
    device: str,
    label: str | None,
    decode_from_prompt: bool,
    routes: Path | None,
    route_weights: bool,
    forward: str,
    recompute: bool,
    as_json: bool,
) -> int:
    """Capture a transformers model over given tokens, one sequence at a time.

    \b
    Example:
      layerbisect capture --model policy --tokens answers.jsonl --out captures/trainer
      layerbisect capture --model policy --tokens answers.jsonl --out captures/layer9 \\
          --points layers.9 --attention eager
      layerbisect capture --model policy --tokens answers.jsonl --out captures/forced \\
          --routes captures/rollout
      layerbisect capture --model policy --tokens answers.jsonl --out captures/training \\
          --forward training --recompute
    """
    from layerbisect.captures.points import select
    from layerbisect.loading import read_config
    from layerbisect.token_file import read_tokens

    # everything that can be wrong with the input is looked at before a directory is made
    train = forward == "training"
    if train and (decode_from_prompt or routes is not None):
        given = "--decode-from-prompt" if decode_from_prompt else "--routes"
        raise LayerBisectError(f"{given} has no gradients; leave it out with --forward training")
    if recompute and not train:
        raise LayerBisectError("--recompute needs --forward training: a backward computes again")
    config = read_config(model)
    sequences = read_tokens(
        tokens, vocab=config["vocab_size"], longest=config.get("max_position_embeddings")
    )
    if decode_from_prompt:
        lacking = [s.name for s in sequences if s.prompt_length is None]
        if lacking:
            raise LayerBisectError(
                f"--decode-from-prompt needs a prompt_length in every line of {tokens}; "
                f"{lacking[0]!r} has none"
            )
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int):
        select(points, layers, moe=True)
    if route_weights and routes is None:
        raise LayerBisectError("--route-weights needs --routes: give the capture that has them")
    forced = None
    if routes is not None:
        from layerbisect.captures.routes import Routes

        forced = Routes.of(routes, weights=route_weights).capture
    _check_free(out)
    from layerbisect.progress import shown

    role = label or ("rollout" if decode_from_prompt else "training" if train else "trainer")
    with shown(console(stderr=True)) as progress, warnings_as_talk():
        progress.start("loading the model", 1)
        from layerbisect.loading import load_model

        loaded = load_model(model, dtype=dtype, attention=attention, device=device)
        from layerbisect.captures.transformers_capture import ModelCapture

        names = [s.name for s in sequences]
        recording = ModelCapture(
            loaded,
            out,
            points=points,
            label=role,
            names=names,
            routes=forced,
            route_weights=route_weights,
        )
        if train:
            loaded.train()
        if recompute:
            loaded.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        _run(loaded, recording, sequences, decode_from_prompt, train, progress)
    from layerbisect.captures.store import Capture
    from layerbisect.captures.summary import summarize
    from layerbisect.wording import count, size

    summary = summarize(Capture.open(out))
    if as_json:
        echo_json({"schema": 1, **summary.to_json()})
    else:
        click.echo(
            f"captured {count(summary.rows, 'row')} of {count(len(summary.sequences), 'sequence')} "
            f"at {count(len(summary.points), 'point')}, {count(summary.scores, 'score')} "
            f"({size(summary.bytes)})",
            err=True,
        )
        click.echo(out)
    return 0


def _run(
    model: Any,
    recording: ModelCapture,
    sequences: tuple[TokenSequence, ...],
    decode: bool,
    train: bool,
    progress: ConsoleProgress,
) -> None:
    import torch

    from layerbisect.captures.replay_decode import decode_like_rollout

    out = recording.directory
    was_there = out.exists()
    total = sum(len(s.ids) for s in sequences)
    try:
        with recording, torch.set_grad_enabled(train):
            progress.start("capturing tokens", total)
            done = 0
            for one in sequences:
                if decode:
                    assert one.prompt_length is not None
                    decode_like_rollout(model, [one.ids], [one.prompt_length])
                else:
                    ids = torch.tensor([one.ids], device=model.device)
                    logits = model(input_ids=ids, use_cache=False).logits
                    if train:
                        _backward(model, ids, logits)
                done += len(one.ids)
                progress.advance(done)
            progress.done()
    except BaseException:
        # what was captured before it broke off can be read; with nothing captured, leave nothing
        if not list(out.glob("rank-*/pass-*")):
            shutil.rmtree(out / "rank-0", ignore_errors=True)
            (out / "capture.json").unlink(missing_ok=True)
            if not was_there and out.is_dir() and not any(out.iterdir()):
                out.rmdir()
        raise


def _backward(model: Any, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """Run the backward of the mean log-prob of ids [1, n] by logits [1, n, vocab], and forget it.

    A sequence of one token has no log-prob, and a gradient of 0.
    """
    scores = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
    (-scores.sum() / max(1, scores.numel())).backward()
    model.zero_grad(set_to_none=True)


def _check_free(out: Path) -> None:
    """Refuse a directory that the writer would refuse, before the model is loaded."""
    if out.exists() and not out.is_dir():
        raise CaptureError(f"{out} is a file; name a directory for the capture")
    if (out / "capture.json").exists():
        raise CaptureError(f"{out} already holds a capture; name another directory or delete it")
    if out.is_dir() and any(out.iterdir()):
        raise CaptureError(f"{out} is not empty; name an empty or a new directory for the capture")
