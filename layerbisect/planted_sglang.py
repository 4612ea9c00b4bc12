"""An SGLang plugin that plants a fault in one layer of the model inside a server.

Only `layerbisect selftest` and the tests load it: it is no entry point of what is installed, but of
a directory that :func:`lay_out` writes for one server, and inert there too where the variable
``LAYERBISECT_SELFTEST`` names no file. That file says which fault, ``name:layer[=value][:decode]``,
and is read again before each pass: one server serves many faults. With ``decode`` the fault shows
in decode steps alone. What became of it is said in a file beside it (:func:`said_of`).

Faults act inside the faulty module's own computation, before it rounds, so that the module's output
is faulty wherever a hook looks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

FILE = "LAYERBISECT_SELFTEST"
NO_LAYER = ("final-norm-weight", "head-scaled")
"""Faults that are no layer's, whatever layer is named."""
NOT_PLANTED = "not planted: "

FORMS = {
    "norm-eps": ("norm", "attn.norm", "the attention norm adds 0.05 to the mean square"),
    "norm-weight": ("norm", "attn.norm", "the attention norm's weight is 5 % too large"),
    "qk-norm-skipped": ("norm", "attn.q", "queries and keys are not normed"),
    "rope-base": ("rope", "attn.q", "queries and keys are rotated with twice the base"),
    "rope-shifted": ("rope", "attn.q", "queries are rotated as if one position later"),
    "softmax-scale": ("attention", "attn.context", "attention scores are 20 % too large"),
    "sliding-window": ("attention", "attn.context", "a token attends to the last eight alone"),
    "kv-heads-regrouped": ("attention", "attn.context", "query head h reads KV head h mod n"),
    "o-proj-permuted": ("linear", "attn.out", "the output projection swaps the first two heads"),
    "residual-dropped": ("residual", "mid", "the stream before attention is lost after it"),
    "router-low-precision": ("router", "mlp.router_logits", "router logits are rounded to 8 bits"),
    "top-k-not-renormalised": ("router", "mlp.expert_weights", "they do not add up to one"),
    "experts-swapped": ("experts", "mlp.out", "experts 0 and 1 compute for one another"),
    "gate-up-swapped": ("experts", "mlp.out", "the experts' gate and up projections are swapped"),
    "final-norm-weight": ("norm", "final_norm", "the final norm's weight is 5 % too large"),
    "head-scaled": ("head", "logits", "logits are 2 % too large"),
}
"""For each fault its operator, the first wrong point, and what is wrong where no value is given."""

TRUTH = {name: operator for name, (operator, _, _) in FORMS.items()}
"""The operator that each fault is in."""


@dataclass(frozen=True)
class Fault:
    """A parsed fault."""

    name: str
    layer: int
    value: float | None
    decode: bool

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Raises ValueError for what is none."""
        name, layer, *rest = text.split(":")
        layer, _, value = layer.partition("=")
        if name not in TRUTH or rest not in ([], ["decode"]):
            raise ValueError(f"no such fault: {text!r}")
        return cls(name, int(layer), float(value) if value else None, rest == ["decode"])

    def of(self, default: float) -> float:
        """The value that was given, or else ``default``."""
        return default if self.value is None else self.value


def said_of(file: Path) -> Path:
    """Where the server says what it planted: the fault's text, or NOT_PLANTED and why not."""
    return file.with_name(f"{file.name}.said")


def lay_out(folder: Path) -> Path:
    """Write an installed distribution whose entry point is this module's.

    Returns the directory to put on the server's path (PYTHONPATH).
    """
    described = folder / "layerbisect_planted-0.dist-info"
    described.mkdir(parents=True)
    described.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: layerbisect-planted\nVersion: 0\n"
    )
    described.joinpath("entry_points.txt").write_text(
        f"[sglang.srt.plugins]\nlayerbisect_planted = {__name__}:register\n"
    )
    return folder


def register() -> None:
    """Entry point of ``sglang.srt.plugins``."""
    file = os.environ.get(FILE)
    if not file:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from layerbisect.planted_sglang_forms import Planter

    planter = Planter(Path(file))
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.forward", planter.forward, HookType.BEFORE)
