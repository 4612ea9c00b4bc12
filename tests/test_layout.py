"""The layout's traps: `bisect` is also a module of the standard library, and `kernels` a package
that transformers and SGLang import.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("bisect", "captures", "kernels")
MAX_LINES = 250


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_root_folder_is_a_namespace_reached_by_a_relative_link(folder: str) -> None:
    assert not list((ROOT / folder).rglob("__init__.py"))
    link = ROOT / "layerbisect" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"


def test_standard_bisect_wins_with_the_root_first_on_the_path() -> None:
    done = python("-c", "import bisect, random; print(bisect.__file__)", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == "bisect.py"
    assert not Path(done.stdout.strip()).is_relative_to(ROOT)


def test_no_other_root_name_hides_a_standard_module() -> None:
    names = {path.name.removesuffix(".py") for path in ROOT.iterdir()}
    assert names & sys.stdlib_module_names <= {"bisect"}


def test_modules_stay_short() -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in (*FOLDERS, "layerbisect", "scripts")
        for path in (ROOT / folder).glob("*.py")
    }
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_command_line_answers_without_the_heavy_packages(option: str) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'sglang', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "from layerbisect.cli import main\n"
        f"main([{option!r}])\n"
    )
    done = python("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
def test_wheel_and_sdist_hold_every_module(tmp_path: Path) -> None:
    expected = {
        f"layerbisect/{folder}/{path.name}"
        for folder in FOLDERS
        for path in (ROOT / folder).glob("*.py")
    } | {f"layerbisect/{path.name}" for path in (ROOT / "layerbisect").glob("*.py")}
    expected.add("layerbisect/py.typed")

    # built from a copy, which leaves no build/ and no egg-info in the tree
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "layerbisect", *FOLDERS):
        subprocess.run(["cp", "-a", ROOT / name, source / name], check=True)
    for kind in ("sdist", "wheel"):
        build = f"from setuptools import build_meta as b; b.build_{kind}({str(tmp_path)!r})"
        done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert expected <= held
    # nothing else lands in site-packages: no top-level bisect, captures or kernels
    top = {name.split("/")[0] for name in held}
    assert {name for name in top if not name.endswith(".dist-info")} == {"layerbisect"}

    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert expected <= files
