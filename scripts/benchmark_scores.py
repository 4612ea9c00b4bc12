"""Judge ten times as many responses: tokens per second, and memory as the input grows.

::

    python -m scripts.benchmark_scores --work /tmp/bench --responses 10000 --tokens 4096

Scores are simulated: those of two engines with heavy-tailed noise. Each size is written as files of
500 responses and judged in a process of its own, by the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord

PER_FILE = 500
# small inputs are held whole for the tests: the smaller size should have a million tokens or more
LIMIT = 2.0
COLUMNS = ("A", "B0", "B1", "C0", "C1")


def write(folder: Path, responses: int, tokens: int) -> None:
    """Write records of ``responses`` simulated responses of ``tokens`` tokens each."""
    generator = np.random.default_rng(0)
    info = RecordInfo(columns={name: Scoring(worker="simulated") for name in COLUMNS})
    for start in range(0, responses, PER_FILE):
        calls = []
        for number in range(start, min(start + PER_FILE, responses)):
            exact = -generator.gamma(1.0, 1.0, tokens)
            a, b, c = (
                -np.abs(exact + generator.standard_t(3, tokens) * 0.004).astype(np.float32)
                for _ in range(3)
            )
            calls.append(
                Call.of(
                    f"s{number}",
                    generator.integers(0, 32000, 64),
                    generator.integers(0, 32000, tokens),
                    {"A": a, "B0": b, "B1": b, "C0": c, "C1": c},
                    group=f"p{number // 8}",
                )
            )
        ScoreRecord(info, calls).save(folder / f"{start:08d}.safetensors")


def judged(folder: Path) -> tuple[float, float, str]:
    """Judge the records in ``folder``: seconds, peak memory in MB, status."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "layerbisect", "scores", "judge", str(folder), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started
    return seconds, usage.ru_maxrss / 1000, str(json.loads(text)["status"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both sizes and print them; 0 where memory grew no more than LIMIT over tenfold input."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="new directory for the records")
    parser.add_argument("--responses", type=int, default=10_000, help="the larger number")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each")
    options = parser.parse_args(arguments)
    rows = []
    for responses in (options.responses // 10, options.responses):
        folder = options.work / str(responses)
        write(folder, responses, options.tokens)
        seconds, memory, status = judged(folder)
        rows.append((responses, memory))
        rate = responses * options.tokens / seconds
        print(
            f"{responses:>8,} responses of {options.tokens:,} tokens: {status}, {seconds:.1f} s, "
            f"{rate:,.0f} tokens/s, peak memory {memory:,.0f} MB",
            flush=True,
        )
    growth = rows[1][1] / rows[0][1]
    print(
        f"ten times the input takes {growth:.2f} times the memory; more than {LIMIT:g} is too much"
    )
    return int(growth > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
