"""The table of all operators on the GPU at hand: the script itself, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from scripts.gpu_replay import main
from scripts.operator_bundles import SMALL, Maker


def test_one_table_and_one_file(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    arguments = [str(tmp_path), "--device", "cpu", "--sizes", "small", "--only", "swiglu"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "replay.json").read_text())
    assert found["device"].startswith("CPU") and found["left_out"] == []
    (replay,) = found["replays"]
    ran = {r["name"]: r for r in replay["results"] if r["state"] == "ran"}
    assert {"reference", "torch", "triton-fast", "triton-deterministic"} <= ran.keys()
    assert all(r["time_ms"] is None and not r["errors"]["convicted"] for r in ran.values())
    (pair,) = [p for p in found["deterministic"] if p["family"] == "triton"]
    assert pair["on"]["batches"]["rows"] == 0
    page = (tmp_path / "replay.md").read_text()
    assert "| swiglu | triton-fast" in page and "## What did not run" in page
    assert "nothing is timed" in page


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 2
    assert "torch sees no GPU here" in result.output
    assert not list(tmp_path.iterdir())


def test_an_operator_that_it_has_not(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path), "--device", "cpu", "--only", "conv"])
    assert result.exit_code == 2 and "--only conv is none of norm" in result.output


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_its_bundles_are_whole(dtype: str) -> None:
    for bundle in Maker(SMALL, dtype).all():
        bundle.check()
        assert all(t.isfinite().all() for t in bundle.inputs.values())
