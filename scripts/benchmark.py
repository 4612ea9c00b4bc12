"""Print what capturing and comparing cost, each as a ratio measured in one run.

    python scripts/benchmark.py [--model DIR] [--tokens 512] [--rounds 7]

The two sides of a ratio are measured in turn, round by round, and the median of the rounds' ratios
is printed with the smallest and the largest: a busy machine slows both sides alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from layerbisect.bisect.carried_gap import carried_gap
from layerbisect.bisect.differences import point_differences
from layerbisect.bisect.join import join
from layerbisect.bisect.progress import NoProgress
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.captures.capture import capture
from layerbisect.captures.store import Capture
from layerbisect.faults import plant
from layerbisect.models import make_tiny


@dataclass(frozen=True)
class Ratio:
    """One figure: a ratio's median, smallest and largest over the rounds."""

    name: str
    median: float
    smallest: float
    largest: float
    unit: str

    @classmethod
    def of(cls, name: str, pairs: list[tuple[float, float]], unit: str) -> Ratio:
        ratios = [a / b for a, b in pairs]
        return cls(name, statistics.median(ratios), min(ratios), max(ratios), unit)


def seconds(work: Callable[[], object]) -> float:
    """Time one call in processor seconds of this process, which other processes disturb least."""
    before = time.process_time()
    work()
    return time.process_time() - before


class Bench:
    """A model, tokens for it, and a folder for captures."""

    def __init__(self, model_directory: Path, tokens: int, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.directory = model_directory
        self.folder = folder
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model_directory, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        draw = torch.Generator().manual_seed(0)
        vocab = self.model.config.vocab_size
        self.ids = torch.randint(3, vocab, (1, tokens), generator=draw)
        self._made = 0

    def forward(self) -> None:
        import torch

        with torch.no_grad():
            self.model(input_ids=self.ids)

    def captured(self, points: str, label: str = "trainer") -> Path:
        """Run one forward with capture; returns the capture's directory."""
        self._made += 1
        directory = self.folder / f"capture-{self._made}"
        with capture(self.model, directory, points=points, label=label):
            self.forward()
        return directory

    def capture_cost(self, name: str, points: str, rounds: int) -> Ratio:
        """Forward with capture over forward without, hooks already in place."""
        pairs = []
        self.forward()
        for index in range(rounds):
            directory = self.folder / f"cost-{points}-{index}"
            with capture(self.model, directory, points=points):
                with_capture = seconds(self.forward)
            pairs.append((with_capture, seconds(self.forward)))
        return Ratio.of(name, pairs, "x a forward without")

    def compare_cost(self, rounds: int) -> Ratio:
        """Comparing every point of two captures over reading the same bytes from their files."""
        sides = [self.captured("all", "rollout"), self.captured("all", "trainer")]
        files = [p for d in sides for p in sorted(d.rglob("*.safetensors"))]
        pairs = []
        for _ in range(rounds):
            pairs.append(
                (
                    seconds(lambda: self._compare(*sides)),
                    seconds(lambda: [np.fromfile(f, np.uint8).sum() for f in files]),
                )
            )
        return Ratio.of("compare all points", pairs, "x reading the same bytes")

    def _compare(self, first: Path, second: Path) -> None:
        opened = (Capture.open(first), Capture.open(second))
        joined = join(*opened)
        sides = _sides(opened, joined.chains, joined)
        experts = getattr(self.model.config, "num_experts", 0)
        point_differences(sides, joined, experts, NoProgress())


def _sides(opened: tuple[Capture, Capture], chains: Any, joined: Any) -> tuple[Side, Side]:
    import torch

    rows = (joined.rollout, joined.trainer)
    first, second = (
        Side(c, chains, r[chains.row], torch.float32) for c, r in zip(opened, rows, strict=True)
    )
    return first, second


def search_cost(folder: Path, layers: int) -> tuple[int, int]:
    """Forwards that a search for one planted fault needs, and those that a scan needs."""
    directory = make_tiny(
        folder / f"deep-{layers}", layers=layers, hidden=64, heads=4, kv_heads=2, head_dim=16,
        experts=4, top_k=2, vocab=256,
    )  # fmt: skip
    bench = Bench(directory, 96, folder / f"deep-{layers}-captures")
    with plant(bench.model, "o-proj-permuted", layers // 3):
        faulty = bench.captured("coarse", "rollout")
    opened = (Capture.open(faulty), Capture.open(bench.captured("coarse")))
    joined = join(*opened)
    sides = _sides(opened, joined.chains, joined)
    reference = ReferenceModel.from_directory(directory)
    search, scan = (carried_gap(reference, sides, mode=m) for m in ("search", "scan"))
    return search.forwards, scan.forwards


@contextmanager
def _bench(model: Path | None, tokens: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="layerbisect-benchmark-") as scratch:
        folder = Path(scratch)
        yield Bench(model or make_tiny(folder / "model"), tokens, folder)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Checkpoint to measure on; a tiny Qwen3-MoE of 16 layers where not given.",
)
@click.option("--tokens", default=512, show_default=True, help="Tokens of the measured forward.")
@click.option("--rounds", default=7, show_default=True, help="Rounds of each ratio.")
@click.option("--layers", default="16,32,64", show_default=True, help="Depths for the search.")
def main(model: Path | None, tokens: int, rounds: int, layers: str) -> None:
    """Print the cost of capturing, of comparing and of searching, as ratios."""
    import torch

    torch.set_num_threads(1)
    console = Console()
    table = Table("what", "median", "smallest", "largest", "in", title="cost, as ratios in one run")
    with _bench(model, tokens) as bench:
        figures = [
            bench.capture_cost("layer inputs captured", "layers.*.input", rounds),
            bench.capture_cost("all points captured", "all", rounds),
            bench.compare_cost(rounds),
        ]
        for f in figures:
            table.add_row(
                f.name, f"{f.median:.2f}", f"{f.smallest:.2f}", f"{f.largest:.2f}", f.unit
            )
        console.print(table)
        depths = Table("layers", "search", "scan", title="forwards to find one faulty layer")
        for depth in (int(text) for text in layers.split(",")):
            search, scan = search_cost(bench.folder, depth)
            depths.add_row(str(depth), str(search), str(scan))
        console.print(depths)


if __name__ == "__main__":
    main()
