"""Shared fixtures, small models made once a session; and which tests may run beside each other."""

import os
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

# before any test imports transformers or starts a server: nothing here needs a network
os.environ["HF_HUB_OFFLINE"] = "1"
# pytest-xdist tells its workers of a terminal of 80 columns, which none of them has
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
if not torch.cuda.is_available():
    # before anything imports triton, which reads it then and never again
    os.environ["TRITON_INTERPRET"] = "1"

SMALL: dict[str, Any] = dict(
    layers=4, hidden=128, heads=4, kv_heads=2, experts=8, top_k=2, vocab=512
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal files to workers of pytest-xdist, and all that start servers to one of them.

    Two servers at a time do not fit beside each other, and what they captured is made once.
    """
    if config.getvalue("dist") != "loadfile":
        return None

    @cache
    def starts_servers(file: str) -> bool:
        return "pytest.mark.server" in (config.rootpath / file).read_text()

    def work(test: str) -> str:
        file = test.split("::")[0]
        return "servers" if starts_servers(file) else file

    # a group of xdist's own would be a part of the test's name, which pytest 9.2 does not let in
    scheduler: Any = import_module("xdist.scheduler").LoadFileScheduling(config, log)
    scheduler._split_scope = work
    return scheduler


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let a worker begin with slow files: one that has them last would let the others wait."""
    if hasattr(config, "workerinput"):
        servers, slow = (
            {item.path for item in items if item.get_closest_marker(name)}
            for name in ("server", "slow")
        )
        items.sort(key=lambda item: (item.path not in servers, item.path not in slow))


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
