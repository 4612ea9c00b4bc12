"""The command line as a whole: help, exit codes, and where output goes."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from layerbisect.captures.errors import CaptureError
from layerbisect.cli import main
from layerbisect.cli.boundary import Boundary

ROOT = Path(__file__).parents[2]
COMMANDS = [
    "demo",
    "selftest",
    "scores",
    "weights",
    "capture",
    "show",
    "bisect",
    "replay",
    "report",
    "training",
    "doctor",
]
SCORES = [f"scores {name}" for name in ("collect", "trainer", "judge", "compare", "carry")]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", [None, *COMMANDS, *SCORES])
def test_help_has_an_example_and_fits(command: str | None, option: str) -> None:
    done = run(*(command.split() if command else []), option)
    assert done.exit_code == 0 and done.stderr == ""
    assert "Example:\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    if command:
        assert f"layerbisect {command}" in done.stdout
        # a group of commands answers nothing itself
        assert "--json" in done.stdout or command == "scores"


def test_commands_are_listed_in_the_order_of_use() -> None:
    listed = run("--help").stdout.split("Commands:\n")[1].split("\n")
    assert [line.split()[0] for line in listed if line] == COMMANDS
    assert "..." not in "".join(listed)


def test_version_is_on_one_line() -> None:
    done = run("--version")
    assert done.exit_code == 0
    assert done.stdout.startswith("layerbisect ") and done.stdout.count("\n") == 1


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


ERRORS: list[tuple[BaseException, str]] = [
    (CaptureError("x holds no capture; make one"), "error: x holds no capture; make one\n"),
    (PermissionError(errno.EACCES, "Permission denied", "x"), "error: Permission denied: x\n"),
    (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device\n"),
    (click.ClickException("of click"), "error: of click\n"),
    (click.BadParameter("nix"), "error: Invalid value: nix\n"),
    (click.FileError("x", "why"), "error: Could not open file 'x': why\n"),
    (MemoryError(), "error: out of memory\nhint: compare fewer sequences, or fewer points\n"),
]


@pytest.mark.parametrize("error, said", ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_an_error_is_one_sentence_on_stderr_and_exit_code_2(
    error: BaseException, said: str, as_json: bool
) -> None:
    group = Boundary(commands={"do": click.Command("do", callback=raising(error))})
    group.commands["do"].params.append(click.Option(["--json", "_json"], is_flag=True))
    group.commands["do"].callback = lambda _json: raising(error)()
    done = CliRunner().invoke(group, ["do", "--json"] if as_json else ["do"])
    assert done.exit_code == 2
    assert done.stderr.startswith(said.split("\n")[0])
    if not as_json:
        assert done.stdout == ""
        return
    verdict = json.loads(done.stdout)
    assert verdict["schema"] == 1 and verdict["status"] == "inconclusive"
    assert verdict["culprits"] == [] and verdict["gap"] is None
    assert f"error: {verdict['reasons'][0]}\n" in done.stderr


def test_an_internal_error_is_not_taken_for_divergence() -> None:
    group = Boundary(commands={"do": click.Command("do", callback=raising(KeyError("k")))})
    done = CliRunner().invoke(group, ["do"])
    assert done.exit_code == 2
    assert "Traceback" in done.stderr and "error: internal error: KeyError: 'k'" in done.stderr


@pytest.mark.parametrize("code", [0, 1, 2, None])
def test_a_command_returns_its_exit_code(code: int | None) -> None:
    group = Boundary(commands={"do": click.Command("do", callback=lambda: code)})
    assert CliRunner().invoke(group, ["do"]).exit_code == (code or 0)


def test_interruption_is_130() -> None:
    group = Boundary(commands={"do": click.Command("do", callback=raising(KeyboardInterrupt()))})
    done = CliRunner().invoke(group, ["do"])
    assert done.exit_code == 130 and done.stdout == ""


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "Usage: layerbisect"),
        (("nix",), "error: No such command 'nix'"),
        (("bisect", "a"), "error: Missing argument 'TRAINER'"),
        (("bisect", "a", "b"), "error: Missing option '--model'"),
        (
            ("bisect", "a", "b", "--model", "m", "--probe", "x"),
            "error: Invalid value for '--probe'",
        ),
        (("demo", "--layer", "-1"), "error: Invalid value for '--layer'"),
        (("demo", "--fault", "nix"), "error: unknown fault 'nix': give none or one of norm-eps"),
        (("show", "--nix"), "error: No such option '--nix'"),
    ],
)
def test_bad_usage_is_2(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(said)
    assert done.stdout == ""


def test_the_module_runs_and_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "layerbisect", "demo", "--help"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == b""


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    running = subprocess.Popen(
        [sys.executable, "-m", "layerbisect", "demo", "--keep", str(kept)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a shell lets what it runs in the background ignore the signal, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while not (kept / "model").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    out, talk = running.communicate(timeout=120)
    assert running.returncode == 130
    assert out == b"" and b"interrupted" in talk and b"Traceback" not in talk
    assert not kept.exists()
