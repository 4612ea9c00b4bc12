"""What capture() refuses, in one sentence, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import layerbisect
from layerbisect.captures.errors import LayerBisectError


@pytest.mark.parametrize("points", [5, None, [1], b"coarse"])
def test_points_that_are_no_patterns_are_refused(points: Any, tmp_path: Path) -> None:
    with pytest.raises(LayerBisectError, match=r"points is .*; give a pattern such as 'coarse'"):
        layerbisect.capture(torch.nn.Linear(1, 1), tmp_path / "c", points=points)


@pytest.mark.parametrize("directory", [None, "", 7])
def test_a_directory_that_is_none_is_refused(directory: Any) -> None:
    with pytest.raises(LayerBisectError, match=f"directory is {directory!r}; name a new directory"):
        layerbisect.capture(torch.nn.Linear(1, 1), directory)


@pytest.mark.parametrize("model", [None, "policy"])
def test_a_model_that_is_none_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(LayerBisectError):
        layerbisect.capture(model, tmp_path / "c")


def test_no_chunks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayerBisectError, match="got a list of 0 models"):
        layerbisect.capture([], tmp_path / "c")
