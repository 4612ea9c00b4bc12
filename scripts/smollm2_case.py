"""Work the SmolLM2 case through: SGLang against transformers in bfloat16, nothing planted.

    python -m scripts.smollm2_case --work DIR
    python -m scripts.smollm2_case --work DIR --page docs/smollm2.md
    python -m scripts.smollm2_case --work DIR --report report.html

Makes the model, lets a real SGLang server on this machine's CPU answer ten prompts, captures it and
transformers on the same tokens, and computes what the gap is made of; then takes causes away. The
tables are printed, and with ``--page`` written into that page between its markers. Every step keeps
its result in ``--work`` and is done again only where that is deleted. Takes about a quarter of an
hour on two cores and 4 GB of disk; needs the environment that ``scripts/test`` makes. ``--report``
does only the steps whose results its page shows, a few minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from rich.console import Console

from layerbisect.captures.errors import LayerBisectError
from layerbisect.models import make_smollm2
from layerbisect.progress import ConsoleProgress, shown
from scripts import smollm2_engines as engines
from scripts import smollm2_naive as naive
from scripts import smollm2_numbers as numbers
from scripts import smollm2_page as page
from scripts.smollm2_engines import write_json
from scripts.smollm2_numbers import Array
from scripts.smollm2_report import MAKES, write_report
from scripts.smollm2_work import Work, trainer
from tests.sglang_server import ServerError

Do = Callable[[Path, ConsoleProgress], object]


@dataclass(frozen=True)
class Step:
    """Something to do, what it leaves in the work directory, and about how long it takes (s)."""

    name: str
    makes: str
    seconds: float
    do: Do


def steps(work: Work) -> list[Step]:
    """Every step, in order."""
    return [
        Step("make the model", "model", 15, lambda path, _: make_smollm2(path)),
        *_server_steps(work),
        _forward(work, "bf16"),
        _forward(work, "fp32", dtype="float32"),
        *(_forward(work, parts, raised=parts, points="coarse") for parts in engines.RAISED),
        Step(
            "transformers, fp32, the fp32 server's answers",
            trainer("fp32-own"),
            5,
            _own_answers(work),
        ),
        Step("carried gap, every boundary", "scan.npz", 200, _arrays(work, numbers.scan)),
        Step("rounding budget", "budget.npz", 80, _arrays(work, numbers.budget)),
        Step("own errors", "own.json", 60, _own(work, exact=False)),
        Step("own errors, float32", "own-fp32.json", 60, _own(work, exact=True)),
        Step("bisect, bfloat16", "verdict.json", 120, _verdict(work, exact=False)),
        Step("bisect, decode against prefill", "decode.json", 120, _decode(work)),
        Step("bisect, float32", "verdict-fp32.json", 150, _verdict(work, exact=True)),
        Step("ways to score", "scoring.json", 10, _scoring(work)),
        Step("metrics of whole tensors", "naive.json", 15, _by_hand(work)),
    ]


def _server_steps(work: Work) -> list[Step]:
    def plain(path: Path, progress: ConsoleProgress) -> None:
        engines.serve(work.model, path, say=_sayer(progress))

    def exact(path: Path, progress: ConsoleProgress) -> None:
        engines.serve(
            work.model,
            path,
            work.conversations,
            requests="given-*",
            arguments=["--dtype", "float32"],
            say=_sayer(progress),
        )

    def raised(path: Path, progress: ConsoleProgress) -> None:
        engines.serve_raised(work.model, path, work.conversations, say=_sayer(progress))

    return [
        Step("SGLang, bfloat16", "served-bf16", 60, plain),
        Step("SGLang, parts of it in float32", "served-raised", 45, raised),
        Step("SGLang, float32", "served-fp32", 60, exact),
    ]


def _sayer(progress: ConsoleProgress) -> Callable[[str], None]:
    progress.start("the server starts", 1)
    return lambda text: progress.start(text, 1)


def _forward(
    work: Work, name: str, *, dtype: str = "bfloat16", raised: str = "", points: str = "all"
) -> Step:
    def do(path: Path, progress: ConsoleProgress) -> None:
        progress.start("forward", len(work.conversations))
        engines.forward(
            work.model,
            path,
            work.conversations,
            dtype=dtype,
            raised=raised,
            points=points,
            advance=progress.advance,
        )

    return Step(f"transformers, {raised + ' in float32' if raised else name}", trainer(name), 5, do)


def _own_answers(work: Work) -> Do:
    def do(path: Path, progress: ConsoleProgress) -> None:
        asked = work.exact_conversations
        progress.start("forward", len(asked))
        engines.forward(
            work.model, path, asked, dtype="float32", points="logprob", advance=progress.advance
        )

    return do


def _arrays(work: Work, compute: Callable[..., dict[str, Array]]) -> Do:
    def do(path: Path, progress: ConsoleProgress) -> None:
        progress.start(compute.__name__, 1)
        found = compute(work.reference(torch.float32), work.layout, progress.advance)
        part = path.with_suffix(".part.npz")
        np.savez(part, allow_pickle=False, **found)
        part.rename(path)

    return do


def _own(work: Work, *, exact: bool) -> Do:
    def do(path: Path, progress: ConsoleProgress) -> None:
        layout = work.exact_layout if exact else work.layout
        model = work.reference(torch.float64 if exact else torch.float32)
        progress.start("own error", 1)
        write_json(path, numbers.judge(model, layout, progress.advance))

    return do


def _verdict(work: Work, *, exact: bool) -> Do:
    def do(path: Path, progress: ConsoleProgress) -> None:
        first, *_, last = (work.exact_captures if exact else work.captures).values()
        numbers.verdict(first, last, work.model, path, progress)

    return do


def _decode(work: Work) -> Do:
    def do(path: Path, progress: ConsoleProgress) -> None:
        numbers.verdict(work.captures["A"], work.captures["B"], work.model, path, progress)

    return do


def _scoring(work: Work) -> Do:
    def do(path: Path, progress: ConsoleProgress) -> None:
        progress.start("ways to score", 1)
        write_json(path, numbers.score_bias(work.reference(torch.float32), work.exact_layout))

    return do


def _by_hand(work: Work) -> Do:
    def do(path: Path, progress: ConsoleProgress) -> None:
        progress.start("metrics of whole tensors", 1)
        model = work.reference(torch.float32)
        layout, layers = work.layout, model.config.num_layers
        found = {
            "rows": naive.naive(layout, layers),
            "equal": naive.equal_values(layout, layers),
            "harm": naive.harm(model, layout),
        }
        write_json(path, found)

    return do


def run(work: Work, console: Console, makes: Collection[str] | None = None) -> None:
    """Do every step whose result is not there, saying what is left; only those that ``makes``."""
    work.directory.mkdir(parents=True, exist_ok=True)
    wanted = [step for step in steps(work) if makes is None or step.makes in makes]
    todo = [step for step in wanted if not (work.directory / step.makes).exists()]
    pace, spent = 1.0, 0.0
    for number, step in enumerate(todo):
        left = pace * sum(each.seconds for each in todo[number:]) / 60
        said = f"[{number + 1}/{len(todo)}] {step.name}; about {left:.1f} min left in all"
        console.print(said, soft_wrap=True)
        begin = time.monotonic()
        with shown(console) as progress:
            step.do(work.directory / step.makes, progress)
        took = time.monotonic() - begin
        console.print(f"    took {took:.0f} s")
        spent += took
        # how this machine compares with the seconds in the table
        pace = spent / sum(each.seconds for each in todo[: number + 1])


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--work", "directory", type=click.Path(path_type=Path), required=True)
@click.option("--page", "written", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--report", "report", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--threads", default=1, show_default=True, help="Threads of the computations.")
def main(directory: Path, written: Path | None, report: Path | None, threads: int) -> None:
    """Command line; tables on stdout, talk on stderr."""
    if report is not None and written is not None:
        raise click.UsageError("--page needs every step and --report a few: give one of them")
    torch.set_num_threads(threads)
    console = Console(stderr=True, markup=False, highlight=False)
    work = Work(directory)
    try:
        if report is not None:
            run(work, console, MAKES)
            for line in write_report(work, report):
                click.echo(line)
            click.echo(f"{report}: open it in a browser")
            return
        run(work, console)
        blocks = work.blocks()
        for name, block in blocks.items():
            click.echo(f"## {name}\n\n{block}")
        if written is not None:
            written.write_text(page.fill(written.read_text(), blocks))
    except (LayerBisectError, ServerError) as error:
        console.print(f"Error: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
