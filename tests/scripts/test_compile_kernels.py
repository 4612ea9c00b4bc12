"""Every Triton kernel compiles for GPUs that aren't here, and one that doesn't is seen."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.compile_kernels import FORMS, TARGETS, Compiled, table, with_kernels

ROOT = Path(__file__).parents[2]

BROKEN = """
import triton
import triton.language as tl
from layerbisect.kernels.triton_forms.common import Build

@triton.jit
def good(x, COUNT: tl.constexpr):
    tl.store(x + tl.arange(0, COUNT), 1.0)

@triton.jit
def broken(x, COUNT: tl.constexpr):
    tl.store(x + tl.arange(0, COUNT), undefined)

@triton.jit
def greedy(x, COUNT: tl.constexpr):
    row, k = tl.arange(0, 64), tl.arange(0, COUNT)
    a = tl.load(x + row[:, None] * COUNT + k[None, :])
    b = tl.load(x + k[:, None] * 64 + row[None, :])
    tl.store(x + row[:, None] * COUNT + row[None, :], tl.dot(a, b).to(x.dtype.element_ty))

def builds():
    return [
        Build("good", good, {"x": "*fp32"}, {"COUNT": 16}),
        Build("broken", broken, {"x": "*fp32"}, {"COUNT": 16}),
        Build("greedy", greedy, {"x": "*bf16"}, {"COUNT": 1024}, 8),
    ]
"""


def compiled(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/compile_kernels.py", *arguments],
        cwd=ROOT,
        # a cache of its own, so that something is compiled
        env=os.environ | {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_every_kernel_compiles_for_every_target(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = compiled(tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    pairs = [(one["kernel"], one["target"]) for one in told]
    assert len(set(pairs)) == len(pairs) > 60
    assert {target for _, target in pairs} == set(TARGETS)
    assert {one["failure"] for one in told} == {""}
    assert all(sum(one["registers"].values()) > 0 for one in told)
    assert all(len(one["spills"]) == 2 for one in told)


def test_a_kernel_that_fails_fails_all_and_says_why(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "broken_forms.py").write_text(BROKEN)
    done = compiled(tmp_path, "--json", "broken_forms")
    assert done.returncode == 1, done.stderr
    failures = {(one["kernel"], one["target"]): one["failure"] for one in json.loads(done.stdout)}
    assert len(failures) == 3 * len(TARGETS)
    for target in TARGETS:
        assert failures["good", target] == ""
        assert "undefined is not defined" in failures["broken", target]
    assert "bytes of shared memory, gfx942 has 65536" in failures["greedy", "gfx942"]


def test_table_has_a_line_each_and_the_reason_below() -> None:
    lines = table(
        [
            Compiled("good", "gfx950", "", {"vgpr": 12, "sgpr": 22}, {"vgpr": 3}, 2048),
            Compiled("good", "sm_90", "", {}, {}, 0),
            Compiled("broken kernel", "sm_90", "NameError: at 3:8:\n\n  ^\nx is not", {}, {}, 0),
        ]
    ).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "kernel target result registers spills shared",
        "good gfx950 ok 12 vgpr, 22 sgpr 3 vgpr 2048",
        "good sm_90 ok not told not told 0",
        "broken kernel sm_90 failed not told not told 0",
        "NameError: at 3:8:",
        "x is not",
    ]
    assert (
        len({line.index(word) for line, word in zip(lines, ("result", "ok", "ok"), strict=False)})
        == 1
    )


def test_without_triton_says_so(tmp_path: Path) -> None:
    hidden = "import importlib.util as u, runpy\nu.find_spec = lambda name: None\n"
    code = hidden + "runpy.run_path('scripts/compile_kernels.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "triton is not installed: pip install triton\n")


def launched(source: str) -> set[str]:
    """Names of what is launched over a grid: ``kernel[grid](...)``."""
    return {
        node.func.value.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    }


def built(source: str) -> set[str]:
    """Names that ``builds()`` mentions."""
    return {
        inner.id
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "builds"
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name)
    }


def test_every_kernel_that_is_launched_is_compiled() -> None:
    modules = {name.rpartition(".")[2] for name in with_kernels()}
    for path in FORMS.glob("*.py"):
        source = path.read_text()
        assert launched(source) <= built(source), path.name
        assert (path.stem in modules) == bool(launched(source)), path.name
    assert launched((FORMS / "linear.py").read_text()) == {"_linear_kernel", "_sum_kernel"}
