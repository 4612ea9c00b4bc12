"""The kernels run on a GPU where there is one, and under Triton's interpreter elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from layerbisect.kernels.replay.poison import poisoned_empty

if not torch.cuda.is_available():
    # triton reads it when it is imported, and never again
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError(
            "triton was imported before it was told to interpret: set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def unwritten_is_seen() -> Iterator[None]:
    """Let what a kernel leaves unwritten be NaN."""
    with poisoned_empty():
        yield
