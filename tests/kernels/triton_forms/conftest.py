"""The kernels run on a GPU where there is one, and under Triton's interpreter elsewhere, as
tests/conftest.py sees to.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from layerbisect.kernels.replay.poison import poisoned_empty


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def unwritten_is_seen() -> Iterator[None]:
    """Let what a kernel leaves unwritten be NaN."""
    with poisoned_empty():
        yield
