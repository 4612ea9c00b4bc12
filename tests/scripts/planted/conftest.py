"""Small engines in float32 that every form is planted into, loaded once a session."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts.planted.checking import Checked

Factory = pytest.TempPathFactory


@pytest.fixture(scope="session")
def moe(small_moe_dir: Path, tmp_path_factory: Factory) -> Checked:
    """A Qwen3-MoE as the rollout computes it: eager attention, eager experts."""
    return Checked.load(small_moe_dir, tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="session")
def moe_trainer(small_moe_dir: Path, tmp_path_factory: Factory) -> Checked:
    """The same as the trainer computes it: sdpa and grouped experts."""
    folder = tmp_path_factory.mktemp("moe-trainer")
    return Checked.load(small_moe_dir, folder, attention="sdpa", experts="grouped_mm")


@pytest.fixture(scope="session")
def qwen3(small_qwen3_dir: Path, tmp_path_factory: Factory) -> Checked:
    """A dense Qwen3 in eager attention."""
    return Checked.load(small_qwen3_dir, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def llama(small_llama_dir: Path, tmp_path_factory: Factory) -> Checked:
    """A Llama in eager attention."""
    return Checked.load(small_llama_dir, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: Factory) -> Iterator[Path]:
    """A folder for captures that the tests of a module share; it goes when they are over."""
    folder = tmp_path_factory.mktemp("shared")
    yield folder
    shutil.rmtree(folder)
