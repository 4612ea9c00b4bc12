"""All implementations of an operator that this project knows, whether they can run here or not."""

from __future__ import annotations

import importlib

from layerbisect.kernels.replay.implementation import OPERATORS, Implementation, Unavailable

PROVIDERS = (
    "layerbisect.kernels.triton_forms.provider",
    "layerbisect.kernels.others.torch_ops",
    "layerbisect.kernels.others.sglang",
    "layerbisect.kernels.others.aiter",
    "layerbisect.kernels.others.transformer_engine",
    "layerbisect.kernels.others.flash_attention",
)
"""Modules that offer implementations, in the order in which a report lists them."""


def implementations(operator: str, device: str) -> list[Implementation | Unavailable]:
    """Return what is known for ``operator`` on ``device`` ("cpu", "cuda"), each with its reason.

    A provider that raises, at import too, is one Unavailable under its own name, and the others
    still answer. Raises ValueError for an operator that doesn't exist.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator must be one of {', '.join(OPERATORS)}, got {operator!r}")
    found: list[Implementation | Unavailable] = []
    for provider in PROVIDERS:
        try:
            found += importlib.import_module(provider).implementations(operator, device)
        except Exception as error:
            # whatever a foreign package throws must not silence the other providers
            name = provider.rpartition("layerbisect.kernels.")[2]
            found.append(Unavailable(name, operator, f"{type(error).__name__}: {error}"))
    return found
