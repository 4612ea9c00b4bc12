"""An SGLang platform that serves on a CPU, for tests and the demo.

SGLang finds it through the entry-point group ``sglang.srt.platforms``. With ``SGLANG_PLATFORM``
unset, SGLang activates every platform that is installed, so ``activate`` answers only when this one
was asked for by name: an installed layerbisect never takes over a GPU host's server.
"""

from __future__ import annotations

import os

NAME = "layerbisect_cpu"


def activate() -> str | None:
    """Name the platform class where ``SGLANG_PLATFORM`` asks for this platform, else None."""
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    return f"{__name__}:CpuPlatform"


def __getattr__(name: str) -> type:
    # the class needs SGLang, which this module must not import until the platform is used
    if name != "CpuPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

    class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        """Out of tree, so that every operator takes its plain PyTorch form."""

        _enum = PlatformEnum.OOT

        def get_default_attention_backend(self) -> str:
            return "torch_native"

    globals()[name] = CpuPlatform
    return CpuPlatform
