"""Fixtures: two engines of one small model, and what they captured with nothing planted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from tests.bisect.engine_pairs import Rollouts, Trainers, record_rollouts
from tests.bisect.making import Engine, random_tokens
from tests.bisect.tied_routers import Tied

# a busy machine is no failure
settings.register_profile("bisect", deadline=None)
settings.load_profile("bisect")


@dataclass(frozen=True)
class Clean:
    """Two engines, the tokens that they ran, and captures of all points in bfloat16."""

    model: Path
    engines: dict[str, Engine]
    tokens: list[list[int]]
    rollout: Path
    trainer: Path


@pytest.fixture(scope="session")
def clean(small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """The small Qwen3-MoE, eager and sdpa, on three sequences of 48 tokens."""
    return _clean(small_moe_dir, tmp_path_factory.mktemp("clean"))


@pytest.fixture(scope="session")
def clean_llama(small_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """The same of the small Llama."""
    return _clean(small_llama_dir, tmp_path_factory.mktemp("clean-llama"))


def _clean(model: Path, folder: Path) -> Clean:
    tokens = random_tokens(512, [48, 48, 48])
    engines = {
        "rollout": Engine.load(model, "rollout"),
        "trainer": Engine.load(model, "trainer", attention="sdpa", experts="grouped_mm"),
    }
    made = {label: engine.capture(folder / label, tokens) for label, engine in engines.items()}
    return Clean(model, engines, tokens, made["rollout"], made["trainer"])


@pytest.fixture(scope="session")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Rollouts:
    """What real SGLang servers captured, clean and with faults planted."""
    return record_rollouts(tmp_path_factory.mktemp("rollouts"))


@pytest.fixture(scope="session")
def trainers(rollouts: Rollouts, tmp_path_factory: pytest.TempPathFactory) -> Trainers:
    """What the real megatron-core captured of the same tokens, in every layout."""
    return Trainers(rollouts, tmp_path_factory.mktemp("trainers"))


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Tied:
    """A small Qwen3-MoE whose routers nearly tie, eager and sdpa."""
    return Tied.make(tmp_path_factory.mktemp("tied"))
