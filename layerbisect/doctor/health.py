"""Say what this machine has, what is missing, what can be done, and what would break a capture.

Versions come from package metadata: nothing heavy is imported, and nothing is started but the GPU
vendors' own tools where they exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerbisect.doctor.check import Check
from layerbisect.doctor.gpus import gpus
from layerbisect.doctor.packages import INSTALL, build_of, installed, package, python
from layerbisect.doctor.possible import captures, replays
from layerbisect.doctor.variables import numerics, own_variables, plugin


@dataclass(frozen=True, slots=True)
class Health:
    """All checks of this machine.

    ``captures`` and ``replays`` say what can be done here, ``environment`` which variables change
    numbers.
    """

    checks: tuple[Check, ...]
    captures: tuple[Check, ...]
    replays: tuple[Check, ...]
    environment: tuple[Check, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, ready for ``json.dumps``."""
        return {"schema": 1, **dataclasses.asdict(self)}


def examine(environment: Mapping[str, str]) -> Health:
    """Look around."""
    gpu, kind = gpus()
    packages = {name: package(name) for name in INSTALL}
    packages["torch"] = _fits(packages["torch"], gpu, kind)
    found = plugin(environment)
    checks = (python(), installed(), *packages.values(), gpu, found, own_variables(environment))
    return Health(checks, captures(packages, found), replays(packages, kind), numerics(environment))


def _fits(torch: Check, gpu: Check, kind: str) -> Check:
    """Say where torch is built for other devices than are here."""
    if torch.state not in ("ok", "note") or not kind:
        return torch
    built, words = build_of(torch.found.split(",")[0])
    if built in ("", kind):
        return torch
    vendor = "ROCm" if kind == "hip" else "CUDA"
    return Check(
        "torch",
        "problem",
        f"{torch.found}, and the GPU is {gpu.found.split(';')[0]}",
        f"install torch's build for {vendor}",
        f"torch {words} does not see this GPU: everything would run on the CPU",
        tried=False,
    )
