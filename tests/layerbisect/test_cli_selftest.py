"""`layerbisect selftest` as a person sees it, with transformers and with a real SGLang server."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from layerbisect import planted_server, selftest
from layerbisect.bisect import locate
from layerbisect.cli import main
from tests.layerbisect.test_selftest import ACCUSED, AGREE
from tests.sglang_server import sglang_installed


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["selftest", *map(str, arguments)])


@pytest.mark.slow
def test_as_it_is_it_finds_ten_of_ten() -> None:
    done = run("--device", "cpu")
    assert done.exit_code == 0, done.output
    lines = done.stdout.rstrip("\n").split("\n")
    assert lines[-1] == "10 of 10 found, the clean pair was not accused"
    judged = [line for line in lines if " right " in line]
    assert len(judged) == 11 and max(map(len, lines)) <= 100
    assert re.fullmatch(r"    nothing +agree +right +[\d.]+", judged[0])
    one = r" 1  norm-weight: norm, layer 0, rollout +norm, layer 0, rollout +right +[\d.]+"
    assert re.fullmatch(one, judged[1])
    assert re.fullmatch(r"10  head-scaled: head, trainer +head, trainer +right .*", judged[10])


def test_a_missed_fault_is_said_with_what_to_do(
    small_moe_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "bisect", lambda *arguments, **options: AGREE)
    kept = tmp_path / "kept it"
    done = run("--model", small_moe_dir, "--device", "cpu", "--keep", kept)
    assert done.exit_code == 1, done.output
    assert "WRONG" in done.stdout and "nobody is convicted" in done.stdout
    said = " ".join(done.stdout.split())
    assert "0 of 10 found, the clean pair was not accused" in said and "Please report it" in said
    command = f"layerbisect bisect '{kept}/01/rollout' '{kept}/00/trainer' --model {small_moe_dir}"
    assert f"next: {command}\n" in done.stdout
    assert f"kept in {kept}" in done.stderr


def test_an_accused_clean_pair_is_said_with_what_to_do(
    small_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "bisect", lambda *arguments, **options: ACCUSED)
    done = run("--model", small_llama_dir, "--device", "cpu")
    assert done.exit_code == 1
    assert "0 of 10 found, the clean pair was accused" in done.stdout
    said = " ".join(done.stdout.split())
    assert "Look at the clean pair first" in said and "--keep DIR` keeps the captures" in said
    # what was replaced is said too
    assert "`experts-swapped` could not be planted, `final-norm-weight` was planted" in said


def test_json_is_all_there_is_on_stdout(
    small_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "bisect", lambda *arguments, **options: AGREE)
    done = run("--model", small_llama_dir, "--device", "cpu", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and found["schema"] == 1 and found["passed"] is False
    assert (found["planted"], found["found"], len(found["tried"])) == (10, 0, 11)
    assert "the clean pair was not accused" in done.stderr


@pytest.mark.parametrize(
    "options, said",
    [
        (("--model", "nix"), "error: no config.json in nix"),
        (("--device", "nix"), "error: cannot use device 'nix'"),
        (("--engine", "nix"), "error: Invalid value for '--engine'"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(options: tuple[str, ...], said: str) -> None:
    done = run(*options)
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith(said) and "Traceback" not in done.stderr


def test_without_sglang_it_says_how_to_install_it(
    small_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run("--engine", "sglang", "--model", small_llama_dir)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: sglang is not installed: run pip install")


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed")
class TestServer:
    def test_faults_in_a_real_server_are_found(
        self, small_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # the second is none of a dense model's: the server says so, and goes on
        monkeypatch.setattr(
            selftest,
            "WANTED",
            ("o-proj-permuted", "rope-shifted", "experts-swapped", "softmax-scale"),
        )
        monkeypatch.setattr(selftest, "INSTEAD", ("norm-weight",))
        kept = tmp_path / "kept"
        done = run(
            *("--engine", "sglang", "--device", "cpu", "--model", small_llama_dir),
            *("--keep", kept, "--json"),
        )
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        planted = [(one["planted"]["fault"], one["planted"]["side"]) for one in found["tried"][1:]]
        assert planted == [
            ("o-proj-permuted", "rollout"),
            ("rope-shifted", "trainer"),
            ("norm-weight", "rollout"),
            ("softmax-scale", "trainer"),
        ]
        (left,) = found["left_out"]
        assert left["fault"] == "experts-swapped" and "SGLang's model is built" in left["why"]
        assert found["setting"]["engines"].startswith("SGLang ")
        # the captures that were kept are judged again by the command that it names
        again = found["tried"][1]["captures"].replace("'", "").split()
        verdict = CliRunner().invoke(main, ["bisect", *again, "--model", str(small_llama_dir)])
        assert verdict.exit_code == 1 and "(linear) on the rollout side" in verdict.stdout

    def test_a_server_that_cannot_start_is_one_sentence(
        self, small_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(planted_server, "_CPU_ARGUMENTS", ("--no-such-argument",))
        done = run("--engine", "sglang", "--device", "cpu", "--model", small_llama_dir)
        assert done.exit_code == 2
        assert re.search(
            r"error: SGLang ended while it started \(.*--no-such-argument", done.stderr
        )
        assert "see what `python -m sglang.launch_server" in done.stderr
