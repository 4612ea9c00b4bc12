"""Which packages are here, by their metadata: nothing of them is imported."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path

from layerbisect.doctor.check import Check

MINIMUM = {
    "torch": (2, 6),
    "transformers": (5, 19),
    "sglang": (0, 5, 16),
    "megatron-core": (0, 16),
    "triton": (3, 8),
}
"""Oldest versions that can work; for SGLang the first with plugins."""

TRIED = {
    "torch": ("2.13", "2.14"),
    "transformers": ("5.19", "5.24"),
    "sglang": ("0.5.23",),
    "megatron-core": ("0.16", "0.19"),
    "triton": ("3.8", "3.9"),
}
"""Versions that were run, on CPUs."""

INSTALL = {
    "torch": "pip install torch",
    "transformers": "pip install 'layerbisect[transformers]'",
    "sglang": "pip install 'layerbisect[sglang]', where the rollout runs",
    "megatron-core": "pip install 'layerbisect[megatron]', where the trainer runs",
    "triton": "pip install 'layerbisect[triton]', to run kernels alone",
    "ray": "not needed; jobs of miles, slime and verl bring it along",
    "aiter": "comes with AMD's ROCm images; `layerbisect replay` runs its kernels",
    "transformer-engine": "comes with training images of NVIDIA and AMD; `layerbisect replay` "
    "runs its kernels",
    "flash-attn": "pip install flash-attn, on a GPU; `layerbisect replay` runs its kernels",
}

_MOVED = {
    "sglang": "points are read where SGLang 0.5.23 computes them; what is elsewhere is told as not "
    "seen",
    "megatron-core": "points are read where 0.16 and 0.19 compute them; what is elsewhere is told "
    "as not seen",
    "transformers": "points are read where 5.19 computes them; what is elsewhere is told as not "
    "seen",
}
_NAMES = {
    "aiter": ("aiter", "amd-aiter"),
    "transformer-engine": (
        "transformer-engine",
        "transformer-engine-torch",
        "transformer-engine-cu13",
        "transformer-engine-cu12",
    ),
    "flash-attn": ("flash-attn", "flash-attn-3", "flash-attn-4"),
}
_NEVER_RUN = {"aiter", "transformer-engine", "flash-attn"}
_BUILD = re.compile(r"^(cuda|hip)\b[^=]*=\s*'([^']+)'", re.MULTILINE)


def python() -> Check:
    """Say which Python this is; an older one cannot run this."""
    return Check("Python", "ok", platform.python_version())


def installed() -> Check:
    """Say whether layerbisect is installed, without which SGLang does not find its plugin."""
    try:
        return Check("layerbisect", "ok", metadata.version("layerbisect"))
    except metadata.PackageNotFoundError:
        return Check(
            "layerbisect",
            "problem",
            "run from a checkout, not installed",
            "pip install -e . in the checkout, so that SGLang finds the plugin",
        )


def package(name: str) -> Check:
    """Look for a package of `INSTALL`: its version, and whether that was tried."""
    for distribution in _NAMES.get(name, (name,)):
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        found = version if distribution == name else f"{version} ({distribution})"
        if name == "torch":
            found = f"{version}, {build_of(version)[1]}"
        return judged(name, version, found)
    return Check(name, "missing", "not installed", INSTALL[name])


def build_of(version: str) -> tuple[str, str]:
    """Say what torch is built for: "cuda", "hip", "cpu" or "", and the same in words."""
    local = version.partition("+")[2]
    if not local:
        try:
            place = metadata.distribution("torch").locate_file("torch/version.py")
            text = Path(str(place)).read_text(encoding="utf-8")
        except (metadata.PackageNotFoundError, OSError):
            text = ""
        for kind, number in _BUILD.findall(text):
            return kind, f"for {'CUDA' if kind == 'cuda' else 'ROCm'} {number}"
        local = "cpu" if "cuda" in text else ""
    if local.startswith("cu"):
        digits = local.removeprefix("cu")
        return "cuda", f"for CUDA {digits[:-1]}.{digits[-1:]}" if digits.isdigit() else "for CUDA"
    if local.startswith("rocm"):
        return "hip", f"for ROCm {local.removeprefix('rocm')}"
    if local.startswith("cpu"):
        return "cpu", "for the CPU alone"
    return "", "a build that does not say what it is for"


def judged(name: str, version: str, found: str = "") -> Check:
    """Say whether a version is supported, and was tried; ``found`` is how it is told."""
    found = found or version
    least = MINIMUM.get(name)
    if least is not None and _numbers(version) < least:
        wanted = ".".join(map(str, least))
        advice = f"{wanted} is the oldest that is supported: {INSTALL[name]}"
        return Check(name, "problem", found, advice)
    if name in _NEVER_RUN:
        return Check(name, "ok", found, effect="was never run with layerbisect", tried=False)
    tried = TRIED.get(name)
    if tried is None or any(_numbers(version)[: len(_numbers(t))] == _numbers(t) for t in tried):
        return Check(name, "ok", found)
    return Check(
        name,
        "note",
        f"{found}; tried with {' and '.join(tried)}",
        "`layerbisect selftest` tries it here" if name != "triton" else "",
        _MOVED.get(name, ""),
        tried=False,
    )


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        digits = re.match(r"\d+", part)
        if digits is None:
            break
        parts.append(int(digits[0]))
        if digits[0] != part:
            break
    return tuple(parts)
