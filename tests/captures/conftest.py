"""Fixtures that write small captures."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from layerbisect.captures.format import CaptureInfo, SequenceInfo, TensorHeader
from layerbisect.captures.points import parse
from layerbisect.captures.rows import Rows
from layerbisect.captures.writer import CaptureWriter, Scores

# a busy machine is no failure
settings.register_profile("captures", deadline=None)
settings.load_profile("captures")

INFO = CaptureInfo(
    engine="test",
    engine_version="1",
    label="rollout",
    device="cpu",
    dtype="bfloat16",
    num_layers=2,
    moe_layers=(),
    points=("layers.0.input", "layers.1.input"),
    model_config={"model_type": "llama", "rope_scaling": None},
)


@pytest.fixture(scope="session")
def info() -> CaptureInfo:
    """Describe a capture of two layer inputs."""
    return INFO


@pytest.fixture
def write_capture(tmp_path: Path) -> Callable[..., Path]:
    """Write a finished capture of random layer inputs: one prefill, then decode steps.

    The sequences are named s0, s1, ...; each prefill has 3 tokens and each step adds one.
    """

    def write(
        name: str = "capture",
        *,
        steps: int = 2,
        sequences: int = 2,
        ranks: int = 1,
        points: tuple[str, ...] = INFO.points,
        hidden: int = 8,
        finish: bool = True,
    ) -> Path:
        directory = tmp_path / name
        random = np.random.default_rng(0)
        torch.manual_seed(0)
        writers = [
            CaptureWriter(directory, replace(INFO, points=points), rank=r, world_size=ranks)
            for r in range(ranks)
        ]
        names = [SequenceInfo(f"s{i}") for i in range(sequences)]
        lengths = [3] + [1] * steps
        for index, length in enumerate(lengths):
            start = sum(lengths[:index])
            rows = Rows.of(
                np.repeat(np.arange(sequences), length),
                np.tile(np.arange(start, start + length), sequences),
                random.integers(0, 100, sequences * length),
            )
            tensors = {p: torch.randn(len(rows), hidden).bfloat16() for p in points}
            for writer in writers:
                writer.write_pass(
                    "decode" if index else "prefill",
                    names,
                    rows,
                    tensors,
                    {p: TensorHeader(parse(p).dims) for p in points},
                    scores=Scores(rows, -random.random(len(rows))),
                )
        if finish:
            for writer in writers:
                writer.finish()
        return directory

    return write
