"""What a checkpoint's config.json says of a capture, where it is on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerbisect.doctor.check import Check

KNOWN = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures whose points are known."""


def model_checks(path: Any) -> Iterator[Check]:
    """Yield what a checkpoint directory says; nothing where there is none here."""
    if not path:
        return
    try:
        config = json.loads(Path(str(path), "config.json").read_text(encoding="utf-8"))
        names = [str(one) for one in config.get("architectures") or ()]
    except (OSError, ValueError, AttributeError, TypeError):
        advice = "give the directory to see whether its points are known"
        yield Check("model", "note", f"no config.json in {path} on this machine", advice)
        return
    if not set(names) & set(KNOWN):
        effect = "its modules are not known: most points are told as not seen"
        found = f"{', '.join(names) or 'no architecture'} in {path}"
        yield Check("model", "problem", found, f"points are known of {', '.join(KNOWN)}", effect)
    else:
        yield Check("model", "ok", names[0])
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method", "") if isinstance(method, dict) else ""
        yield Check(
            "quantization",
            "problem",
            f"the checkpoint is quantised {method}".strip(),
            "serve the checkpoint in full",
            "bisect computes its reference from the checkpoint, and refuses quantised ones",
        )
