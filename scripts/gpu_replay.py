"""Replay every operator on the GPU at hand and write the table: see gpu_replay.sh.

    python scripts/gpu_replay.py DIR [--sizes small] [--device cpu] [--only OPERATOR]

The inputs are random numbers at the sizes of a real layer, so that no model is needed; errors are
judged on the CPU in float64. With ``--device cpu`` Triton's kernels are interpreted and nothing is
timed, which is good for a check of this script and for nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

from layerbisect.kernels.replay.deterministic import Pair, deterministic_table
from layerbisect.kernels.replay.replayer import replay
from layerbisect.kernels.replay.report import Replay, Result, Variation
from scripts.operator_bundles import QWEN3_30B_A3B, SMALL, Maker

SIZES = {"qwen3-30b-a3b": QWEN3_30B_A3B, "small": SMALL}
BUDGET_S = 280
"""What is not begun by then is left out, and said to be."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--sizes", type=click.Choice(list(SIZES)), default="qwen3-30b-a3b", show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16")
@click.option("--only", multiple=True, metavar="OPERATOR", help="May be given more than once.")
@click.option("--repeats", type=click.IntRange(2), default=5, show_default=True)
def main(
    folder: Path, sizes: str, device: str, dtype: str, only: tuple[str, ...], repeats: int
) -> None:
    """Write FOLDER/replay.json and FOLDER/replay.md."""
    if device == "cuda" and not torch.cuda.is_available():
        click.echo("error: torch sees no GPU here; --device cpu interprets the kernels", err=True)
        sys.exit(2)
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    bundles = Maker(SIZES[sizes], dtype).all()
    if unknown := sorted(set(only) - {bundle.point for bundle in bundles}):
        known = ", ".join(bundle.point for bundle in bundles)
        raise click.UsageError(f"--only {unknown[0]} is none of {known}")
    started = time.monotonic()
    replays: list[Replay] = []
    left_out: list[str] = []
    for bundle in bundles:
        if only and bundle.point not in only:
            continue
        spent = time.monotonic() - started
        if spent > BUDGET_S:
            left_out.append(bundle.point)
            continue
        click.echo(f"{spent:4.0f} s  {bundle.point}", err=True)
        replays.append(replay(bundle, device=device, repeats=repeats, timeout_s=60))
    facts = {
        **_machine(device),
        "sizes": sizes,
        "dtype": dtype,
        "repeats": repeats,
        "seconds": round(time.monotonic() - started),
        "left_out": left_out,
    }
    folder.mkdir(parents=True, exist_ok=True)
    pairs = deterministic_table(replays)
    data = {
        "schema": 1,
        **facts,
        "replays": [one.to_json() for one in replays],
        "deterministic": [pair.to_json() for pair in pairs],
    }
    (folder / "replay.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "replay.md").write_text(_page(facts, replays, pairs))
    click.echo(f"wrote {folder}/replay.json and {folder}/replay.md", err=True)


def _machine(device: str) -> dict[str, Any]:
    if device == "cuda":
        what = torch.cuda.get_device_properties(0)
        name = getattr(what, "gcnArchName", f"sm_{what.major}{what.minor}")
        described = f"{what.name} ({name})"
    else:
        described = f"CPU ({platform.machine()}), Triton interpreted: nothing is timed"
    runtime = torch.version.hip or torch.version.cuda
    return {"device": described, "torch": torch.__version__, "runtime": runtime or "none"}


def _page(facts: dict[str, Any], replays: list[Replay], pairs: Sequence[Pair]) -> str:
    lines = [
        "# Operators replayed",
        "",
        f"{facts['device']}, torch {facts['torch']} (runtime {facts['runtime']}), "
        f"{facts['dtype']}, sizes {facts['sizes']}, {facts['seconds']} s. "
        "Written by `scripts/gpu_replay.sh`.",
        "",
        "Error: 95th percentile over rows, as a multiple of what the low-precision reference "
        "loses. Repeats, batch and chunks: rows with other bits.",
        "",
        "| operator | implementation | error | of the bound | repeats | batch | chunks | ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    missing: dict[str, list[str]] = {}
    for one in replays:
        for result in one.results:
            if result.state == "ran":
                lines.append(_row(one.point, result))
            else:
                text = f"{result.name}: {result.state}: {result.why}"
                missing.setdefault(text, []).append(one.point)
    lines += [
        "",
        "## Deterministic off and on",
        "",
        "| operator | switch | error | repeats | batch | chunks | time |",
        "|---|---|---|---|---|---|---|",
        *(_pair(pair) for pair in pairs),
    ]
    if missing:
        lines += ["", "## What did not run", ""]
        lines += [f"- {text} ({', '.join(points)})" for text, points in missing.items()]
    if facts["left_out"]:
        lines += ["", f"Left out for want of time: {', '.join(facts['left_out'])}."]
    return "\n".join(lines) + "\n"


def _row(point: str, result: Result) -> str:
    errors = result.errors
    assert errors is not None
    used = "" if errors.bound_used is None else f"{errors.bound_used:.2g}"
    cells = [
        point,
        f"{result.name} ({result.package})",
        f"{errors.ratio:.2f}" + (" **convicted**" if errors.convicted else ""),
        used,
        *(_variation(v) for v in (result.repeats, result.batches, result.chunks)),
        "" if result.time_ms is None else f"{result.time_ms:.3f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _pair(pair: Pair) -> str:
    both = (pair.off, pair.on)
    ran = [one if one is not None and one.state == "ran" else None for one in both]
    errors = ["-" if e is None else f"{e:.2f}" for e in pair.error_ratio]
    cells = [
        pair.point,
        pair.family,
        " -> ".join(errors),
        *(
            " -> ".join(
                "-" if one is None else _variation(getattr(one, name)) or "-" for one in ran
            )
            for name in ("repeats", "batches", "chunks")
        ),
        "" if pair.time_ratio is None else f"{pair.time_ratio:.2f}x",
    ]
    return "| " + " | ".join(cells) + " |"


def _variation(variation: Variation | None) -> str:
    return "" if variation is None else f"{variation.rows} of {variation.of}"


if __name__ == "__main__":
    main()
