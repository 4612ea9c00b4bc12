"""The public names, and the folder that is called like a function."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, assert_type

import pytest

import layerbisect

ROOT = Path(__file__).parents[2]

if TYPE_CHECKING:
    # what a user's type checker sees
    from layerbisect import Capture, Verdict

    assert_type(layerbisect.bisect("a", "b", model="m"), Verdict)
    assert_type(layerbisect.Capture.open("a"), Capture)
    assert_type(layerbisect.__version__, str)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_are_these() -> None:
    assert layerbisect.__all__ == [
        "Capture",
        "LayerBisectError",
        "ScoreRecord",
        "Verdict",
        "__version__",
        "bisect",
        "capture",
        "judge",
        "replay",
    ]
    assert layerbisect.__all__ == sorted(layerbisect.__all__)
    assert dir(layerbisect) == layerbisect.__all__
    for name in layerbisect.__all__:
        assert getattr(layerbisect, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        layerbisect.nothing  # noqa: B018 - reading it is the test


@pytest.mark.parametrize(
    "imports",
    [
        "import layerbisect",
        "import layerbisect.bisect.join",
        "from layerbisect import bisect; import layerbisect",
        "from layerbisect.bisect.join import join; import layerbisect",
        "import layerbisect; import layerbisect.bisect.verdict, layerbisect.bisect.join",
        "import importlib; importlib.import_module('layerbisect.bisect.join'); import layerbisect",
        "import bisect, layerbisect.cli; import layerbisect",
        "from layerbisect import *; import layerbisect.bisect.join; import layerbisect",
    ],
)
def test_bisect_is_a_function_and_a_folder_in_any_order_of_imports(imports: str) -> None:
    code = (
        f"{imports}\n"
        "import inspect, layerbisect.bisect.join, layerbisect.bisect as folder\n"
        "from layerbisect import bisect as function\n"
        "assert callable(layerbisect.bisect) and function is layerbisect.bisect is folder\n"
        "assert list(inspect.signature(function).parameters)[:2] == ['rollout', 'trainer']\n"
        "assert folder.join.__name__ == 'layerbisect.bisect.join'\n"
        "import sys\n"
        "print('torch' in sys.modules)"
    )
    assert run(code) == "False\n"


def test_calling_the_folder_calls_the_function(tmp_path: Path) -> None:
    from layerbisect.bisect import locate

    def shape(function: Callable[..., object]) -> list[tuple[object, ...]]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert shape(layerbisect.bisect) == shape(locate.bisect)
    with pytest.raises(layerbisect.LayerBisectError, match="holds no capture"):
        layerbisect.bisect(tmp_path, tmp_path, model=tmp_path)


def test_reading_a_capture_needs_no_torch() -> None:
    names = "('torch', 'transformers', 'rich', 'click')"
    assert run(
        "import sys\n"
        f"for name in {names}: sys.modules[name] = None\n"
        "import layerbisect\n"
        "print(layerbisect.Capture.__name__, layerbisect.Verdict.__name__)"
    ) == ("Capture Verdict\n")
