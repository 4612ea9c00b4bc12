"""An SGLang plugin of the tests: breaks layerbisect's own table, as another SGLang would.

Inert unless ``TEST_BROKEN_TAPS`` is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def break_taps() -> None:
    """Let the table name a module that is not there, fail, and show rows of no pass."""
    from layerbisect.captures.recorder import Tap
    from layerbisect.captures.sglang import adapter as sglang_adapter

    whole = sglang_adapter.taps

    def fails(*call: Any) -> Any:
        raise RuntimeError("no such field")

    def broken(layout: Any, num_layers: int, check: Callable[[Any], Any]) -> tuple[Tap, ...]:
        kept = [
            tap
            for tap in whole(layout, num_layers, check)
            if tap.point not in ("embed", "final_norm") and not tap.point.endswith("attn.out")
        ]
        return (
            *kept,
            Tap(r"model\.embed_tokens", "embed", lambda args, kwargs, out: check(out[:-1])),
            Tap(r"model\.norm", "final_norm", fails),
            Tap(r"model\.layers\.(?P<layer>\d+)\.attention", "layers.{layer}.attn.out", fails),
        )

    sglang_adapter.taps = broken


def register() -> None:
    """Entry point of ``sglang.srt.plugins``."""
    if os.environ.get("TEST_BROKEN_TAPS"):
        break_taps()
