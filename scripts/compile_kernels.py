"""Compile every Triton kernel for GPUs that needn't be here, and print what it takes.

    python scripts/compile_kernels.py [--json] [MODULE ...]

Compiles what ``builds()`` of each module of kernels/triton_forms returns for gfx950 (MI355X),
gfx942 (MI300) and sm_90 (Hopper), and prints a line a kernel and target with registers, spills and
shared memory as the compiler tells them. A kernel that needs more shared memory than the target has
fails. Exits with 1 if any fails, and with 2 where triton is not installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMS = Path(__file__).resolve().parents[1] / "kernels" / "triton_forms"

# target: triton's backend, architecture and threads a warp, and bytes of shared memory that a
# program may take
TARGETS: dict[str, tuple[str, str | int, int, int]] = {
    "gfx950": ("hip", "gfx950", 64, 160 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What compiling one kernel for one target gave; ``failure`` is empty where it went well.

    ``registers`` are by kind and thread (on AMD, those for accumulation, agpr, count among the vgpr
    too); ``spills`` by kind: registers on AMD, bytes on NVIDIA. ``shared`` is in bytes.
    """

    kernel: str
    target: str
    failure: str
    registers: dict[str, int]
    spills: dict[str, int]
    shared: int


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "modules", nargs="*", metavar="MODULE", help="importable names; default all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed: pip install triton", file=sys.stderr)
        return 2
    # triton reads it when it is imported, here and in the workers
    os.environ.pop("TRITON_INTERPRET", None)
    results = compile_all(options.modules or with_kernels())
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(table(results))
    return int(not results or any(result.failure for result in results))


def with_kernels() -> list[str]:
    """Name the modules of kernels/triton_forms that launch kernels of their own."""
    return [
        f"layerbisect.kernels.triton_forms.{path.stem}"
        for path in sorted(FORMS.glob("*.py"))
        if "\ndef builds()" in path.read_text()
    ]


def compile_all(modules: list[str]) -> list[Compiled]:
    """Compile in as many processes as there are cores: a compiler's crash is a failure as well."""
    names = [
        (module, index, build.name)
        for module in modules
        for index, build in enumerate(importlib.import_module(module).builds())
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        jobs = [
            (name, target, pool.submit(compile_one, module, index, target))
            for module, index, name in names
            for target in TARGETS
        ]
        return [_result(name, target, job) for name, target, job in jobs]


def _result(name: str, target: str, job: Future[Compiled]) -> Compiled:
    try:
        return job.result()
    except BrokenProcessPool:
        failure = "the compiler crashed, on this kernel or another that was compiled beside it"
        return Compiled(name, target, failure, {}, {}, 0)


def compile_one(module: str, index: int, target: str) -> Compiled:
    """Compile the module's build at ``index``, and read what the compiler says of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    build = importlib.import_module(module).builds()[index]
    backend, architecture, warp, limit = TARGETS[target]
    types = {n: build.signature.get(n, "constexpr").partition(":") for n in build.fn.arg_names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, (kind, _, divisor) in enumerate(types.values())
        if kind.startswith("*") or divisor == "16"
    }
    try:
        compiled = triton.compile(
            ASTSource(build.fn, {n: t[0] for n, t in types.items()}, build.constexprs, aligned),
            target=GPUTarget(backend, architecture, warp),
            options={"num_warps": build.num_warps, "enable_fp_fusion": False},
        )
        usage = _amd(compiled.asm["amdgcn"]) if backend == "hip" else _nvidia(compiled.asm["ptx"])
    except Exception as error:
        # whatever the compiler throws is what the table is there to show
        return Compiled(build.name, target, f"{type(error).__name__}: {error}", {}, {}, 0)
    shared = compiled.metadata.shared
    failure = (
        f"needs {shared} bytes of shared memory, {target} has {limit}" if shared > limit else ""
    )
    return Compiled(build.name, target, failure, *usage, shared)


Usage = tuple[dict[str, int], dict[str, int]]


def _amd(assembly: str) -> Usage:
    """Read registers and spilled registers from the metadata at the end of the assembly."""
    found = {
        name: int(value)
        for name, value in re.findall(r"^\s*(?:- )?\.(\w+_count):\s+(\d+)$", assembly, re.MULTILINE)
    }
    kinds = ("vgpr", "agpr", "sgpr")
    spilled = {kind: found[f"{kind}_spill_count"] for kind in ("vgpr", "sgpr")}
    return {kind: found[f"{kind}_count"] for kind in kinds}, spilled


def _nvidia(ptx: str) -> Usage:
    """Ask the assembler that comes with triton; nothing where there is none."""
    import triton

    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    architecture = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if not assembler.exists() or architecture is None:
        return {}, {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        said = subprocess.run(
            [
                *(assembler, "-v", "--fmad=false", f"--gpu-name={architecture[1]}"),
                *(source, "-o", source.with_suffix(".cubin")),
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return (
        {"registers": int(registers[1])} if registers else {},
        {"stored": int(spills[1]), "loaded": int(spills[2])} if spills else {},
    )


def table(results: list[Compiled]) -> str:
    """Set the results out in columns, with each failure's first and last line below its own."""
    wide = max((len(result.kernel) for result in results), default=0)
    lines = [f"{'kernel':{wide}}  target  result  {'registers':30}  {'spills':22}  shared"]
    for result in results:
        said = "failed" if result.failure else "ok"
        lines.append(
            f"{result.kernel:{wide}}  {result.target:6}  {said:6}  {_counts(result.registers):30}  "
            f"{_counts(result.spills):22}  {result.shared}"
        )
        told = [line for line in result.failure.splitlines() if line.strip()]
        lines += [f"    {line}" for line in dict.fromkeys((*told[:1], *told[-1:]))]
    return "\n".join(lines)


def _counts(counts: dict[str, Any]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "not told"


if __name__ == "__main__":
    sys.exit(main())
