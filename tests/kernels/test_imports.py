"""The references, the bounds and the replayer need torch alone, until a kernel is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONAL = (
    "triton",
    "sglang",
    "aiter",
    "transformer_engine",
    "flash_attn",
    "megatron",
    "transformers",
)


def test_all_but_the_triton_forms_import_without_any_kernel_package() -> None:
    names = [
        ".".join(("layerbisect", *path.relative_to(ROOT).with_suffix("").parts))
        for path in sorted((ROOT / "kernels").rglob("*.py"))
        if "triton_forms" not in path.parts
    ]
    assert {"layerbisect.kernels.rms_norm", "layerbisect.kernels.swiglu"} <= set(names)
    code = (
        "import importlib, sys\n"
        f"for name in {OPTIONAL}:\n"
        "    sys.modules[name] = None\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
