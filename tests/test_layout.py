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
# modules are written for about 250 lines; a little over is no reason to tear one apart
MAX_LINES = 300


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
        for path in (ROOT / folder).rglob("*.py")
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


def modules() -> set[str]:
    """Every module as it is named in a distribution."""
    roots = {folder: f"layerbisect/{folder}" for folder in FOLDERS} | {"layerbisect": "layerbisect"}
    return {
        f"{name}/{path.relative_to(ROOT / folder)}"
        for folder, name in roots.items()
        for path in (ROOT / folder).rglob("*.py")
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, so that no build/ and no egg-info land in the tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "layerbisect", *FOLDERS):
        subprocess.run(["cp", "-a", ROOT / name, copy / name], check=True)
    return copy


def build(kind: str, source: Path, target: Path) -> Path:
    code = f"from setuptools import build_meta as b; print(b.build_{kind}({str(target)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def test_wheel_holds_every_module_and_nothing_beside_the_package(
    source: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(build("wheel", source, tmp_path)) as archive:
        held = set(archive.namelist())
    assert modules() | {"layerbisect/py.typed"} <= held
    # no top-level bisect, captures or kernels in anyone's site-packages
    top = {name.split("/")[0] for name in held}
    assert {name for name in top if not name.endswith(".dist-info")} == {"layerbisect"}


def test_sdist_holds_every_module(source: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        held = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert modules() | {"layerbisect/py.typed", "pyproject.toml", "LICENSE"} <= held


def test_editable_install_reaches_the_checkout(source: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build("editable", source, tmp_path)) as archive:
        archive.extractall(tmp_path / "site")
    # a module that comes after the installation is found as well
    (source / "kernels" / "later.py").write_text("")
    code = (
        "import site, sys, sysconfig\n"
        f"site.addsitedir({str(tmp_path / 'site')!r})\n"
        "sys.path.append(sysconfig.get_path('purelib'))\n"
        "import bisect, layerbisect.bisect, layerbisect.kernels.later\n"
        "import layerbisect.captures.errors\n"
        "print(layerbisect.captures.errors.__file__)\n"
        "print(bisect.insort)\n"
    )
    # isolated, without site: an installed layerbisect must not answer
    done = python("-I", "-S", "-c", code)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[0]).is_relative_to(source)
