"""The entry points, without an engine: inert unless asked, and never in a server's way."""

import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from layerbisect.captures.sglang import cpu_platform as sglang_cpu_platform
from layerbisect.captures.sglang import plugin as sglang_plugin
from layerbisect.captures.sglang.session import Session


class Kind(Enum):
    AFTER = 1
    AROUND = 2
    BEFORE = 3


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """Stand in for SGLang's hook registry: what was registered, by the last name of the target."""
    hooks: dict[str, Callable[..., Any]] = {}

    class Registry:
        @staticmethod
        def register(target: str, hook: Callable[..., Any], kind: Kind) -> None:
            hooks[target.rpartition(".")[2]] = hook

    module: Any = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry, module.HookType = Registry, Kind
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("CAPTURE", "REFUSED", "CHECKED", "POINTS", "REQUESTS", "LABEL"):
        # set first, so that what the plugin sets itself is taken back as well
        monkeypatch.setenv(f"LAYERBISECT_{name}", "")
        monkeypatch.delenv(f"LAYERBISECT_{name}")
    return hooks


def test_inert_without_a_directory(hooked: dict[str, Callable[..., Any]]) -> None:
    sglang_plugin.register()
    assert hooked == {}


def test_hooks_with_a_directory(
    hooked: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LAYERBISECT_CAPTURE", str(tmp_path / "capture"))
    sglang_plugin.register()
    assert set(hooked) == {
        "load_model",
        "forward",
        "forward_batch_generation",
        "on_idle",
        "generate_request",
    }
    assert not (tmp_path / "capture").exists()


def test_a_directory_that_holds_something_is_refused_in_every_process(
    hooked: dict[str, Callable[..., Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "rank-0").mkdir()
    monkeypatch.setenv("LAYERBISECT_CAPTURE", str(tmp_path))
    sglang_plugin.register()
    assert hooked == {}
    assert "not an empty directory" in caplog.text
    # a process that is started by the first inherits its environment
    sglang_plugin.register()
    assert hooked == {}


def test_what_the_first_rank_writes_does_not_refuse_the_second(
    hooked: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LAYERBISECT_CAPTURE", str(tmp_path))
    sglang_plugin.register()
    hooked.clear()
    (tmp_path / "rank-0").mkdir()
    sglang_plugin.register()
    assert hooked


def test_the_engine_goes_on_where_the_capture_cannot_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(tmp_path / "capture")
    # a model runner of some other version, that has none of what is asked of it
    runner = SimpleNamespace(is_draft_worker=False)
    session.loaded(None, runner)
    assert "serving goes on without capturing" in caplog.text
    assert session.forward(lambda runner, batch: batch, runner, "result") == "result"
    assert session.batch(lambda worker, batch: batch, None, "result") == "result"
    session.idle()


def test_errors_of_the_engine_pass_through(tmp_path: Path) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("out of memory")

    session = Session(tmp_path / "capture")
    with pytest.raises(RuntimeError, match="out of memory"):
        session.forward(fails, SimpleNamespace(is_draft_worker=False), "batch")
    with pytest.raises(RuntimeError, match="out of memory"):
        session.batch(fails, None, "batch")


@pytest.mark.parametrize(
    ("status", "rid", "renamed"),
    [("Starting", None, True), ("Starting", "mine", False), ("Up", None, False)],
)
def test_only_what_sglang_asks_itself_while_starting_is_named(
    status: str, rid: str | None, renamed: bool
) -> None:
    manager = SimpleNamespace(server_status=SimpleNamespace(name=status))
    request = SimpleNamespace(rid=rid)
    sglang_plugin.name_warm_up(manager, request)
    assert (request.rid != rid) is renamed


def test_the_cpu_platform_answers_only_to_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert sglang_cpu_platform.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    assert sglang_cpu_platform.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "layerbisect_cpu")
    assert sglang_cpu_platform.activate() == (
        "layerbisect.captures.sglang.cpu_platform:CpuPlatform"
    )
