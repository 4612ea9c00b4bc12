"""Which GPUs are here, by their vendors' own tools: no driver is opened by this process."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerbisect.doctor.check import Check

NEEDED = "not needed: everything runs on a CPU, more slowly"
COMPILED = {"sm_90": "H100, H200", "gfx950": "MI355X, MI350X", "gfx942": "MI300X, MI325X"}
"""Architectures for which the Triton kernels of layerbisect are compiled in tests."""

_SECONDS = 10
_FREE = 0.9
_GIB = 2**30
_MIB = 2**20


class _ToolError(Exception):
    """A tool is there and does not say what was asked."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; memory in bytes, None where the tool does not say; ``arch`` as compilers call it."""

    name: str
    arch: str
    total: int | None
    free: int | None
    driver: str = ""


def gpus() -> tuple[Check, str]:
    """Say which GPUs are here, and of which kind: "cuda", "hip" or ""."""
    failed: Check | None = None
    for tool, (kind, look) in _TOOLS.items():
        if shutil.which(tool) is None:
            continue
        try:
            found = look(tool)
        except _ToolError as error:
            failed = failed or Check("GPU", "problem", str(error), f"run {tool} by hand")
            continue
        if found:
            return _told(found), kind
    return failed or Check("GPU", "missing", "none", NEEDED), ""


def _told(found: list[Gpu]) -> Check:
    kinds = Counter(f"{gpu.name} ({gpu.arch})" if gpu.arch else gpu.name for gpu in found)
    said = [", ".join(f"{number} x {name}" for name, number in kinds.items())]
    if found[0].driver:
        said.append(f"driver {found[0].driver}")
    if memory := _memory(found):
        said.append(memory)
    known = sorted({gpu.arch for gpu in found if gpu.arch} - COMPILED.keys())
    effect = "layerbisect was never run on a GPU; its kernels are compiled for this one in tests"
    if known:
        effect = f"layerbisect was never run on a GPU; its kernels are not compiled for {known[0]}"
    elif not found[0].arch:
        effect = "layerbisect was never run on a GPU"
    return Check("GPU", "ok", "; ".join(said), "", effect, tried=False)


def _memory(found: list[Gpu]) -> str:
    sizes = [(gpu.free, gpu.total) for gpu in found]
    if any(free is None or not total for free, total in sizes):
        return ""
    busy = [
        f"GPU {number} has {free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
        for number, (free, total) in enumerate(sizes)
        if free is not None and total and free < _FREE * total
    ]
    if busy:
        others = "; the others are free" if len(busy) < len(found) else ""
        return ", ".join(busy) + others
    return f"all free ({(found[0].total or 0) / _GIB:.0f} GiB each)"


def _run(tool: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [tool, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _ToolError(f"{tool} does not answer ({type(error).__name__})") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise _ToolError(f"{tool} failed: {said[0] if said else done.returncode}")
    return done.stdout


def _json(tool: str, *arguments: str) -> Any:
    text = _run(tool, *arguments)
    try:
        # warnings may come before
        return json.loads(text[min(i for i in (text.find("{"), text.find("[")) if i >= 0) :])
    except ValueError:
        raise _ToolError(f"{tool} did not answer in JSON: {text.strip()!r:.80}") from None


def _nvidia(tool: str) -> list[Gpu]:
    fields = "name,compute_cap,driver_version,memory.total,memory.free"
    found = []
    for line in _run(tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5:
            raise _ToolError(f"{tool} answered {line!r:.80}")
        name, arch, driver, total, free = cells
        arch = f"sm_{arch.replace('.', '')}" if arch[:1].isdigit() else ""
        found.append(Gpu(name, arch, _bytes(total, _MIB), _bytes(free, _MIB), driver))
    return found


def _amd(tool: str) -> list[Gpu]:
    static = _list(_json(tool, "static", "--asic", "--driver", "--json"))
    usage = _list(_json(tool, "metric", "--mem-usage", "--json"))
    memory = {one.get("gpu"): _dict(one.get("mem_usage")) for one in usage}
    found = []
    for one in static:
        asic, held = _dict(one.get("asic")), memory.get(one.get("gpu"), {})
        total, used = (_bytes(_value(held.get(k)), _MIB) for k in ("total_vram", "used_vram"))
        free = None if total is None or used is None else total - used
        driver = _dict(one.get("driver"))
        version = str(driver.get("version") or driver.get("driver_version") or "")
        arch = str(asic.get("target_graphics_version") or "")
        found.append(Gpu(str(asic.get("market_name") or "AMD GPU"), arch, total, free, version))
    return found


def _rocm(tool: str) -> list[Gpu]:
    said = _json(
        tool, "--showproductname", "--showdriverversion", "--showmeminfo", "vram", "--json"
    )
    lowered = {
        name: {str(k).lower(): str(v) for k, v in card.items()}
        for name, card in _dict(said).items()
        if isinstance(card, dict)
    }
    driver = lowered.get("system", {}).get("driver version", "")
    found = []
    for name, card in sorted(lowered.items()):
        if not name.startswith("card"):
            continue
        total = _bytes(card.get("vram total memory (b)"), 1)
        used = _bytes(card.get("vram total used memory (b)"), 1)
        free = None if total is None or used is None else total - used
        named = card.get("card series") or card.get("card model") or "AMD GPU"
        found.append(Gpu(named, card.get("gfx version", ""), total, free, driver))
    return found


def _list(said: Any) -> list[Mapping[str, Any]]:
    # newer versions wrap the list
    rows = said.get("gpu_data") if isinstance(said, dict) else said
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _value(field: Any) -> Any:
    return field.get("value") if isinstance(field, dict) else field


def _bytes(text: Any, unit: int) -> int | None:
    try:
        return int(float(text) * unit)
    except (TypeError, ValueError):
        return None


_TOOLS = {
    "nvidia-smi": ("cuda", _nvidia),
    "amd-smi": ("hip", _amd),
    "rocm-smi": ("hip", _rocm),
}
