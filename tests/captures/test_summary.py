"""What a capture holds, in numbers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from layerbisect.captures.format import CaptureInfo, PointSeen, SequenceInfo, TensorHeader
from layerbisect.captures.rows import Rows
from layerbisect.captures.store import Capture
from layerbisect.captures.summary import (
    PhaseSummary,
    PointSummary,
    SequenceSummary,
    summarize,
)
from layerbisect.captures.writer import CaptureWriter, Scores

WriteCapture = Callable[..., Path]


def test_a_plain_capture(write_capture: WriteCapture) -> None:
    directory = write_capture(steps=4, sequences=2)
    summary = summarize(Capture.open(directory, label="mine"))
    assert (summary.label, summary.engine, summary.dtype) == ("mine", "test", "bfloat16")
    assert summary.finished and summary.problems == () and summary.ranks == 1
    assert summary.phases == {"prefill": PhaseSummary(1, 6), "decode": PhaseSummary(4, 8)}
    assert (summary.rows, summary.keyless_rows, summary.scores) == (14, 0, 14)
    assert summary.sequences == tuple(SequenceSummary(f"s{i}", "", 7, 7, 0) for i in range(2))
    assert summary.points == tuple(
        PointSummary(f"layers.{i}.input", "observed", "", 14, "BF16", (8,), 14 * 8 * 2)
        for i in range(2)
    )
    assert summary.bytes == sum(p.stat().st_size for p in directory.rglob("pass-*"))
    assert json.loads(json.dumps(summary.to_json()))["phases"]["decode"] == {
        "passes": 4,
        "rows": 8,
    }


def test_repeats_holes_and_points_that_are_not_seen(tmp_path: Path, info: CaptureInfo) -> None:
    for rank in range(2):
        writer = CaptureWriter(
            tmp_path / "c", replace(info, weight_version="7"), rank=rank, world_size=2
        )
        rows = Rows.of([0, 0, 1, 1, 2, 3], [0, 1, 0, 1, 5, 0], [4, 5, 4, 6, 7, 4])
        names = [SequenceInfo("a"), SequenceInfo("b"), SequenceInfo("hole"), SequenceInfo("x", "y")]
        query = "layers.1.attn.q"
        header = TensorHeader(("row", "head", "channel"), {"head": (3 * rank, 3 * rank + 3, 6)})
        writer.write_pass(
            "forward",
            names,
            rows,
            {query: torch.zeros(6, 3, 2)},
            {query: header},
            scores=Scores(Rows.of([0, 1], [2, 1], [9, 6]), np.zeros(2)),
        )
        writer.points_seen(
            {
                "layers.1.attn.context": PointSeen("not_observable", "fused"),
                "layers.0.input": PointSeen("not_observable", "no module"),
            }
        )
        writer.error("a tap failed")
    summary = summarize(Capture.open(tmp_path / "c"))
    assert (summary.rows, summary.keyless_rows, summary.repeated_rows) == (6, 1, 1)
    assert (summary.ranks, summary.weight_version, summary.finished) == (2, "7", False)
    assert (summary.scores, summary.repeated_scores) == (2, 0)
    assert summary.sequences == (
        SequenceSummary("a", "", 3, 2, 0),
        SequenceSummary("b", "", 2, 2, 0),
        SequenceSummary("hole", "", 6, 1, 1),
        SequenceSummary("x", "y", 1, 1, 0),
    )
    # in order of computation, whoever spoke first
    assert summary.points == (
        PointSummary("layers.0.input", "not_observable", "no module", 0, None, None, 0),
        PointSummary("layers.1.attn.q", "observed", "", 6, "F32", (6, 2), 2 * 6 * 3 * 2 * 4),
        PointSummary("layers.1.attn.context", "not_observable", "fused", 0, None, None, 0),
    )
    assert len(summary.problems) == 3


def test_a_capture_without_one_of_its_ranks(write_capture: WriteCapture) -> None:
    directory = write_capture(ranks=2)
    shutil.rmtree(directory / "rank-0")
    summary = summarize(Capture.open(directory))
    assert summary.ranks == 1 and not summary.finished
    assert summary.problems == ("ranks [0] of 2 wrote nothing",)
