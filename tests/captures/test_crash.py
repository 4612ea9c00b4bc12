"""A process that is killed while it records loses at most the pass in flight."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import CaptureInfo
from layerbisect.captures.store import Capture
from layerbisect.captures.writer import CaptureWriter

POINT = "layers.0.input"

# both ranks of a tensor-parallel engine in one process; pass n holds the number n
PROGRAM = """
import sys
import torch
from layerbisect.captures.format import CaptureInfo, SequenceInfo, TensorHeader
from layerbisect.captures.rows import Rows
from layerbisect.captures.writer import CaptureWriter

info = CaptureInfo("test", "1", "rollout", "cpu", "float32", 1, (), ("layers.0.input",))
writers = [CaptureWriter(sys.argv[1], info, rank=r, world_size=2) for r in (0, 1)]
header = TensorHeader(("row", "hidden"))
for number in range(100_000):
    rows = Rows.of([0], [number], [number % 7])
    value = torch.full((1, 1 << 16), float(number))
    for writer in writers:
        writer.write_pass(
            "decode", [SequenceInfo("s")], rows, {"layers.0.input": value},
            {"layers.0.input": header},
        )
        writer.error(f"something of pass {number}")
"""


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.13])
def test_passes_before_a_kill_are_read(tmp_path: Path, delay: float) -> None:
    directory = tmp_path / "capture"
    third = directory / "rank-1" / "pass-000002.safetensors"
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, str(directory)])
    try:
        deadline = time.monotonic() + 60
        while not third.exists():
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        # another process may read meanwhile
        assert not Capture.open(directory).finished
        time.sleep(delay)
    finally:
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    capture = Capture.open(directory)
    count = len(capture.rows)
    assert count >= 3
    np.testing.assert_array_equal(capture.rows.position, np.arange(count))
    assert capture.keys.known.all()
    values = capture.read(POINT)
    assert (values == np.arange(count, dtype=np.float32)[:, None]).all()
    assert not capture.finished
    ended = "was not finished by rank 0, rank 1: the engine still runs, or it died"
    assert any(ended in problem for problem in capture.problems)
    written = [len(list((directory / f"rank-{r}").glob("pass-*"))) for r in (0, 1)]
    assert count == min(written) and max(written) - count <= 1
    assert any("left out" in p for p in capture.problems) == (written[0] != written[1])


def test_temporary_files_of_a_crash_are_not_read(tmp_path: Path, info: CaptureInfo) -> None:
    directory = tmp_path / "capture"
    CaptureWriter(directory, info)
    whole = (directory / "rank-0" / "manifest.json").read_bytes()
    (directory / "rank-0" / ".pass-000000.safetensors.tmp").write_bytes(b"half a pass")
    (directory / "rank-0" / ".manifest.json.tmp").write_bytes(whole[:20])
    with pytest.raises(CaptureError, match="is an empty capture"):
        Capture.open(directory)


@pytest.mark.parametrize("stage", ["nothing", "folder", "description"])
def test_a_crash_while_a_capture_begins(tmp_path: Path, info: CaptureInfo, stage: str) -> None:
    directory = tmp_path / "capture"
    CaptureWriter(directory, info)
    if stage != "description":
        (directory / "capture.json").unlink()
    (directory / "rank-0" / "manifest.json").unlink()
    if stage == "nothing":
        (directory / "rank-0").rmdir()
    with pytest.raises(CaptureError, match="holds no capture|is an empty capture"):
        Capture.open(directory)
