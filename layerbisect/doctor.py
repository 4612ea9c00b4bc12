"""Say what this machine has, what is missing, and which captures are possible.

Versions come from package metadata: nothing heavy is imported, and nothing is started but
`nvidia-smi` or `rocm-smi` where they exist.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

State = Literal["ok", "missing", "problem"]
PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN = "layerbisect"
PLATFORM = "SGLANG_PLATFORM"
PREFIX = "LAYERBISECT_"
VARIABLES = (
    "LAYERBISECT_CAPTURE",
    "LAYERBISECT_LABEL",
    "LAYERBISECT_ONLY",
    "LAYERBISECT_POINTS",
    "LAYERBISECT_REQUESTS",
    "LAYERBISECT_ROUND",
    "LAYERBISECT_TAIL",
    "LAYERBISECT_WEIGHTS",
    "LAYERBISECT_WEIGHTS_FIRST",
    "LAYERBISECT_WEIGHTS_FORM",
)
"""What is read by the plugin, or by the hook of miles and slime."""

MINIMUM = {"torch": (2, 6), "transformers": (5, 19), "sglang": (0, 5, 16), "megatron-core": (0, 16)}
"""Oldest versions that were tried; for SGLang the first with plugins."""

INSTALL = {
    "torch": "pip install torch",
    "transformers": "pip install 'layerbisect[transformers]'",
    "sglang": "pip install 'layerbisect[sglang]', where the rollout runs",
    "megatron-core": "pip install 'layerbisect[megatron]', where the trainer runs",
    "triton": "pip install triton, to run kernels alone",
    "aiter": "comes with AMD's images, to run its kernels alone",
}
_NAMES = {"aiter": ("aiter", "amd-aiter")}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: what was found, and what to do where that is something."""

    name: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """All checks, and which captures are possible here."""

    checks: tuple[Check, ...]
    captures: tuple[Check, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, ready for ``json.dumps``."""
        return {"schema": 1, **dataclasses.asdict(self)}


def examine(environment: Mapping[str, str] | None = None) -> Health:
    """Look around."""
    variables = os.environ if environment is None else environment
    packages = {name: _package(name) for name in INSTALL}
    plugin = _plugin()
    checks = (
        _python(),
        _installed(),
        *packages.values(),
        _gpu(),
        plugin,
        _variables(variables),
    )
    return Health(checks, _captures(packages, plugin))


def _python() -> Check:
    # an older one cannot run this
    return Check("Python", "ok", platform.python_version())


def _installed() -> Check:
    try:
        return Check("layerbisect", "ok", metadata.version("layerbisect"))
    except metadata.PackageNotFoundError:
        return Check(
            "layerbisect",
            "problem",
            "run from a checkout, not installed",
            "pip install -e . in the checkout, so that SGLang finds the plugin",
        )


def _package(name: str) -> Check:
    for distribution in _NAMES.get(name, (name,)):
        try:
            found = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        least = MINIMUM.get(name)
        if least is not None and _numbers(found) < least:
            wanted = ".".join(map(str, least))
            return Check(name, "problem", found, f"{wanted} is the oldest that is supported")
        return Check(name, "ok", found)
    return Check(name, "missing", "not installed", INSTALL[name])


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not part[:1].isdigit():
            break
        parts.append(int(digits))
    return tuple(parts)


def _gpu() -> Check:
    tools = {
        "nvidia-smi": ["--query-gpu=name,driver_version", "--format=csv,noheader"],
        "rocm-smi": ["--showproductname", "--showdriverversion", "--csv"],
    }
    for tool, arguments in tools.items():
        path = shutil.which(tool)
        if path is None:
            continue
        try:
            done = subprocess.run(
                [path, *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Check("GPU", "problem", f"{tool} does not answer ({type(error).__name__})")
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if done.returncode or not lines:
            said = (done.stderr or done.stdout).strip().splitlines()
            found = f"{tool} failed: {said[0] if said else done.returncode}"
            return Check("GPU", "problem", found, f"run {tool} by hand")
        return Check("GPU", "ok", _gpu_names(tool, lines))
    return Check("GPU", "missing", "none", "not needed: everything runs on a CPU, more slowly")


def _gpu_names(tool: str, lines: list[str]) -> str:
    if tool == "rocm-smi":
        # a header line, then a card each
        return "; ".join(lines[1:])
    cards = [line.split(", ") for line in lines]
    names = sorted({card[0] for card in cards})
    return f"{len(cards)} x {', '.join(names)}, driver {cards[0][-1]}"


def _plugin() -> Check:
    found = [e for e in metadata.entry_points(group=PLUGIN_GROUP) if e.name == PLUGIN]
    name = "SGLang plugin"
    if not found:
        return Check(
            name,
            "missing",
            f"no entry point {PLUGIN!r} in {PLUGIN_GROUP}",
            "pip install layerbisect in the environment that runs SGLang",
        )
    if len(found) > 1:
        return Check(name, "problem", f"{len(found)} of them", "keep one installed layerbisect")
    return Check(name, "ok", f"{found[0].value}, inert unless LAYERBISECT_CAPTURE is set")


def _variables(environment: Mapping[str, str]) -> Check:
    """A server captures where LAYERBISECT_CAPTURE is set, which is easily forgotten."""
    found = {k: v for k, v in sorted(environment.items()) if k.startswith(PREFIX)}
    if environment.get(PLATFORM):
        found[PLATFORM] = environment[PLATFORM]
    if not found:
        return Check(
            "variables", "ok", f"no {PREFIX}* is set: servers started here capture nothing"
        )
    said = ", ".join(f"{name}={value}" for name, value in found.items())
    unknown = [name for name in found if name not in (*VARIABLES, PLATFORM)]
    if unknown:
        known = [name.removeprefix(PREFIX) for name in VARIABLES]
        near = difflib.get_close_matches(unknown[0].removeprefix(PREFIX), known, 1)
        meant = f"did you mean {PREFIX}{near[0]}" if near else f"known are {', '.join(VARIABLES)}"
        return Check("variables", "problem", said, f"nothing reads {', '.join(unknown)}; {meant}")
    if f"{PREFIX}CAPTURE" in found:
        return Check("variables", "ok", said, "an SGLang server started here captures")
    return Check("variables", "problem", said, "captures nothing until LAYERBISECT_CAPTURE is set")


def _captures(packages: Mapping[str, Check], plugin: Check) -> tuple[Check, ...]:
    transformers = _needs(
        "transformers model",
        packages,
        ("torch", "transformers"),
        "`layerbisect capture`, or in Python",
    )
    sglang = _needs(
        "SGLang server", packages, ("torch", "sglang"), "start it with LAYERBISECT_CAPTURE=DIR"
    )
    if sglang.state == "ok" and plugin.state != "ok":
        sglang = Check(sglang.name, plugin.state, "the plugin is not in place", plugin.advice)
    megatron = _needs(
        "Megatron-core job",
        packages,
        ("torch", "megatron-core"),
        "`with layerbisect.capture(model, DIR)` on every rank, or the hook of miles and slime",
    )
    return transformers, megatron, sglang


def _needs(name: str, packages: Mapping[str, Check], wanted: tuple[str, ...], how: str) -> Check:
    lacking = [packages[one] for one in wanted if packages[one].state != "ok"]
    if lacking:
        return Check(name, lacking[0].state, f"needs {lacking[0].name}", lacking[0].advice)
    return Check(name, "ok", "possible", how)
