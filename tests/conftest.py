"""Shared fixtures: small models, made once a session."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

# before any test imports transformers or starts a server: nothing here needs a network
os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    # before anything imports triton, which reads it then and never again
    os.environ["TRITON_INTERPRET"] = "1"

SMALL: dict[str, Any] = dict(
    layers=4, hidden=128, heads=4, kv_heads=2, experts=8, top_k=2, vocab=512
)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Let torch use one thread: on small tensors and busy cores, waiting for others costs most."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of 16 layers and 16 experts top-4, in bfloat16."""
    from layerbisect.models import make_tiny

    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-qwen3-moe")


@pytest.fixture(scope="session")
def small_moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of 4 layers and 8 experts top-2, in bfloat16."""
    return _small(tmp_path_factory, "qwen3_moe")


@pytest.fixture(scope="session")
def small_qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense Qwen3 of 4 layers, in bfloat16."""
    return _small(tmp_path_factory, "qwen3")


@pytest.fixture(scope="session")
def small_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 4 layers, in bfloat16."""
    return _small(tmp_path_factory, "llama")


def _small(factory: pytest.TempPathFactory, family: str) -> Path:
    from layerbisect.models import make_tiny

    return make_tiny(factory.mktemp("models") / f"small-{family}", family, **SMALL)
