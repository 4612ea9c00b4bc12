"""SGLang plugin that raises parts of a served model to float32 while the server runs.

The file that ``SMOLLM2_RAISED_FILE`` names says which, and is read again before each pass: ``head``
computes the logits in float32, as ``--enable-fp32-lm-head`` does, and ``stream`` keeps the residual
stream in float32, as SGLang's own switch of its norms does for other models.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FILE = "SMOLLM2_RAISED_FILE"


def raise_parts(runner: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``ModelRunner.forward``: set the model's own switches as the file says."""
    parts = Path(os.environ[FILE]).read_text().split()
    runner.model.logits_processor.use_fp32_lm_head = "head" in parts
    for module in runner.model.modules():
        if hasattr(module, "fp32_residual"):
            module.fp32_residual = "stream" in parts


def register() -> None:
    """Entry point of ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    HookRegistry.register(target, raise_parts, HookType.BEFORE)


def install(folder: Path) -> Path:
    """Lay this module out as an installed distribution, for its entry point to be found.

    Returns the directory to put on the server's path.
    """
    described = folder / "smollm2_plugin-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    described.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: smollm2-plugin\nVersion: 0\n"
    )
    described.joinpath("entry_points.txt").write_text(
        "[sglang.srt.plugins]\nsmollm2_plugin = smollm2_plugin:register\n"
    )
    folder.joinpath("smollm2_plugin.py").write_bytes(Path(__file__).read_bytes())
    return folder
