"""Shared fixtures, small models made once a session; and which tests may run beside each other."""

import os
from importlib import import_module
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep all tests of servers in one worker of pytest-xdist, and begin with the slow ones.

    Two servers at a time do not fit beside each other, and what they captured is made once. A
    worker that is given its longest work last would let the others wait.
    """
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        if item.get_closest_marker("server"):
            item.add_marker(pytest.mark.xdist_group("server"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda i: (not i.get_closest_marker("server"), i.path not in slow))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let the tests of a file that are in no group share a worker: they share fixtures."""
    if config.getvalue("dist") != "loadgroup":
        return None
    scheduler: Any = import_module("xdist.scheduler").LoadGroupScheduling(config, log)
    # what is in no group is a scope of its own, tests/folder/test_file.py::test
    scope = scheduler._split_scope
    scheduler._split_scope = lambda nodeid: scope(nodeid).split("::")[0]
    return scheduler


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
