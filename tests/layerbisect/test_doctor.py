"""What `layerbisect doctor` says about a machine."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from layerbisect import doctor
from layerbisect.cli import main
from layerbisect.doctor import Check, examine

ROOT = Path(__file__).parents[2]
EVERYTHING = {
    "layerbisect": "0.1.0",
    "torch": "2.14.1+cu130",
    "transformers": "5.19.0",
    "sglang": "0.5.23",
    "megatron-core": "0.16.1",
    "triton": "3.8.0",
    "amd-aiter": "0.1.5",
}
ENTRY = metadata.EntryPoint("layerbisect", "layerbisect.captures.sglang.plugin:register", "group")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """What is installed, as a test may change it; nothing but that is found on this machine."""
    packages = dict(EVERYTHING)

    def version(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [ENTRY] if "layerbisect" in packages else []
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    return packages


def check(name: str, **environment: str) -> Check:
    health = examine(environment)
    (found,) = [c for c in (*health.checks, *health.captures) if c.name == name]
    return found


def test_with_everything_here_every_capture_is_possible(installed: dict[str, str]) -> None:
    health = examine({})
    assert {c.name: c.state for c in health.captures} == {
        "transformers model": "ok",
        "Megatron-core job": "ok",
        "SGLang server": "ok",
    }
    states = {c.name: c.state for c in health.checks}
    assert {name for name, state in states.items() if state != "ok"} == {"GPU"}
    assert check("torch").found == "2.14.1+cu130"
    assert check("aiter").found == "0.1.5"


@pytest.mark.parametrize("name", ["torch", "transformers", "sglang", "megatron-core", "triton"])
def test_what_is_missing_comes_with_what_to_do(installed: dict[str, str], name: str) -> None:
    del installed[name]
    found = check(name)
    assert found.state == "missing" and found.found == "not installed" and found.advice


@pytest.mark.parametrize(
    "name, version, state",
    [
        ("transformers", "4.57.1", "problem"),
        ("transformers", "5.19.0", "ok"),
        ("transformers", "5.24.0.dev0", "ok"),
        ("sglang", "0.5.10", "problem"),
        ("sglang", "0.5.16.post1", "ok"),
        ("torch", "2.5.1+cpu", "problem"),
        ("torch", "2.6.0a0+git1234", "ok"),
    ],
)
def test_versions_that_are_too_old_are_told(
    installed: dict[str, str], name: str, version: str, state: str
) -> None:
    installed[name] = version
    assert check(name).state == state


def test_a_capture_needs_its_engine_and_the_plugin(installed: dict[str, str]) -> None:
    del installed["sglang"]
    assert check("SGLang server").found == "needs sglang"
    assert check("transformers model").state == "ok"
    installed["sglang"] = "0.5.23"
    del installed["layerbisect"]
    assert check("SGLang plugin").state == "missing"
    assert check("SGLang server").state == "missing"
    assert "pip install layerbisect" in check("SGLang server").advice
    assert check("layerbisect").state == "problem"


def test_variables_that_make_a_server_capture_are_told(installed: dict[str, str]) -> None:
    assert check("variables", HOME="/root").found.startswith("no LAYERBISECT_* is set")
    capturing = check("variables", LAYERBISECT_CAPTURE="/x", LAYERBISECT_POINTS="all")
    assert capturing.found == "LAYERBISECT_CAPTURE=/x, LAYERBISECT_POINTS=all"
    assert capturing.state == "ok"
    assert check("variables", LAYERBISECT_POINTS="all").state == "problem"


def test_a_variable_that_nothing_reads_is_told(installed: dict[str, str]) -> None:
    found = check("variables", LAYERBISECT_CAPTURE="/x", LAYERBISECT_PONTS="all")
    assert found.state == "problem" and found.found.endswith("LAYERBISECT_PONTS=all")
    assert found.advice == "nothing reads LAYERBISECT_PONTS; did you mean LAYERBISECT_POINTS"
    unlike = check("variables", LAYERBISECT_XYZZY="1").advice
    assert unlike.startswith("nothing reads LAYERBISECT_XYZZY; known are LAYERBISECT_CAPTURE, ")
    for name in doctor.VARIABLES:
        told = check("variables", **{name: "1", "LAYERBISECT_CAPTURE": "/x"})
        assert told.state == "ok", name


def test_every_variable_that_is_documented_is_known() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {m for page in pages for m in re.findall(r"LAYERBISECT_[A-Z_]*[A-Z]", page.read_text())}
    assert named and named <= set(doctor.VARIABLES)


@pytest.mark.parametrize(
    "tool, script, state, found",
    [
        ("nvidia-smi", "echo 'H200, 570.1'; echo 'H200, 570.1'", "ok", "2 x H200, driver 570.1"),
        ("nvidia-smi", "echo 'no driver' >&2; exit 9", "problem", "nvidia-smi failed: no driver"),
        ("rocm-smi", "echo 'device,name'; echo 'card0,MI355X'", "ok", "card0,MI355X"),
    ],
)
def test_gpus_are_named_by_their_own_tool(
    installed: dict[str, str], tmp_path: Path, tool: str, script: str, state: str, found: str
) -> None:
    path = tmp_path / tool
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    assert (check("GPU").state, check("GPU").found) == (state, found)


def test_the_command_prints_a_line_for_each_and_json(installed: dict[str, str]) -> None:
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "captures possible here" in done.stdout and done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 100
    health = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert health["schema"] == 1
    assert [c["name"] for c in health["captures"]] == [
        "transformers model",
        "Megatron-core job",
        "SGLang server",
    ]
    for one in health["checks"]:
        assert one["name"] in done.stdout


def test_it_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from layerbisect.cli import main\n"
        "try: main(['doctor', '--json'])\n"
        "except SystemExit as leaving: assert leaving.code == 0\n"
        "heavy = {'torch', 'transformers', 'sglang', 'triton', 'numpy'}\n"
        "print(heavy & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "set()\n"
    assert doctor.MINIMUM.keys() <= doctor.INSTALL.keys()
