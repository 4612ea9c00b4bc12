"""The reader that the capture format's page shows reads what layerbisect wrote."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layerbisect.captures.format import CaptureInfo, SequenceInfo, TensorHeader
from layerbisect.captures.rows import Rows
from layerbisect.captures.store import Capture
from layerbisect.captures.writer import CaptureWriter, Scores
from layerbisect.cli import main
from tests.docs.test_pages import block

TOKENS = (
    '{"ids": [5, 17, 4, 99, 2, 5, 8, 6, 11, 12], "name": "a", "prompt_length": 6}\n'
    '{"ids": [5, 17, 4, 99, 2, 5, 8, 6, 21, 22, 23], "name": "b", "prompt_length": 7}\n'
)


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(block("capture-format.md", "<!-- reader -->"), names)
    return names


def same(reader: dict[str, Any], directory: Path) -> int:
    """Compare both readers; returns how many rows have a key."""
    capture = Capture.open(directory)
    rows, scores = reader["read_capture"](directory)
    assert len(rows) == len(capture.rows)
    for place, (key, _) in enumerate(rows):
        known = capture.keys.known[place]
        assert (tuple(capture.keys.key[place].tolist()) if known else None) == key
    for point in rows[0][1]:
        held = np.flatnonzero(capture.has(point))
        found = np.stack([rows[place][1][point] for place in held])
        np.testing.assert_array_equal(found, capture.read(point, held))
    assert [value for _, value in scores] == capture.scores.logprob.tolist()
    for place, (key, _) in enumerate(scores):
        if capture.scores.keys.known[place]:
            assert key == tuple(capture.scores.keys.key[place].tolist())
    return int(capture.keys.known.sum())


def test_it_reads_a_prefill_and_decode_steps(
    reader: dict[str, Any], small_moe_dir: Path, tmp_path: Path
) -> None:
    tokens, out = tmp_path / "tokens.jsonl", tmp_path / "capture"
    tokens.write_text(TOKENS)
    asked = ["--model", str(small_moe_dir), "--tokens", str(tokens), "--out", str(out)]
    with pytest.raises(SystemExit) as left:
        main(["capture", *asked, "--decode-from-prompt", "--points", "all"])
    assert not left.value.code
    assert same(reader, out) == 21


def test_it_knows_context_salts_and_rows_behind_a_hole(
    reader: dict[str, Any], tmp_path: Path
) -> None:
    info = CaptureInfo(
        engine="none",
        engine_version="0",
        label="rollout",
        device="cpu",
        dtype="bfloat16",
        num_layers=1,
        moe_layers=(),
        points=("layers.0.input",),
    )
    writer = CaptureWriter(tmp_path / "capture", info)
    writer.write_pass(
        "prefill",
        [SequenceInfo("cached"), SequenceInfo("salted", "adapter:sql"), SequenceInfo("hole")],
        Rows.of([0, 1, 1, 2], [2, 0, 1, 5], [7, 8, 2**33, 1]),
        {"layers.0.input": torch.randn(4, 3).bfloat16()},
        {"layers.0.input": TensorHeader(("row", "hidden"))},
        scores=Scores(Rows.of([1], [2], [4]), np.array([-1.5])),
        context=Rows.of([0, 0], [0, 1], [5, 6]),
    )
    writer.finish()
    assert same(reader, tmp_path / "capture") == 3
