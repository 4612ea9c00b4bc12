"""The Triton forms as implementations of operators: fast, and deterministic."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial

from layerbisect.kernels.replay.implementation import Implementation, Mode, Unavailable

# operator: family, module and function of each pair of forms
_FORMS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "rms_norm": (("triton", "rms_norm", "rms_norm"),),
    "linear": (("triton", "linear", "linear"),),
    "rope": (("triton", "rope", "rope"),),
    "attention": (
        ("triton", "attention", "attention"),
        ("triton-decode", "attention_decode", "attention_by_decode"),
    ),
    "router": (("triton", "router", "route"),),
    "swiglu": (("triton", "swiglu", "swiglu"),),
    "experts": (("triton", "experts", "experts"),),
    "combine": (("triton", "experts", "combine"),),
    "logprob": (("triton", "logprob", "logprob"),),
    "add": (("triton", "add", "add"),),
}
_MODES: tuple[Mode, ...] = ("fast", "deterministic")


def implementations(operator: str, device: str) -> list[Implementation | Unavailable]:
    """Return the Triton forms of ``operator``, or why they cannot run on ``device``."""
    forms = [(*form, mode) for form in _FORMS[operator] for mode in _MODES]
    if why := _cannot_run(device):
        return [Unavailable(f"{family}-{mode}", operator, why) for family, _, _, mode in forms]
    # its distribution has other names too, as for ROCm
    package = f"triton {importlib.import_module('triton').__version__}"
    found: list[Implementation | Unavailable] = []
    for family, module, function, mode in forms:
        forms_of = importlib.import_module(f"layerbisect.kernels.triton_forms.{module}")
        run = partial(getattr(forms_of, function), deterministic=mode == "deterministic")
        found.append(Implementation(f"{family}-{mode}", operator, package, run, mode, family))
    return found


def _cannot_run(device: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed: pip install triton"
    from layerbisect.kernels.triton_forms.common import interpreting

    if device.startswith("cuda") or interpreting():
        return None
    return (
        f"on the device {device} Triton's kernels run under its interpreter only: set "
        "TRITON_INTERPRET=1 before the start"
    )
