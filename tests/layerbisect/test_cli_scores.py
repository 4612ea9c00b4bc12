"""`layerbisect scores` as a user meets it."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.cli import main
from tests.bisect.scores.making import Columns, run


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["scores", *map(str, arguments)])


def lowered(scores: Columns, _: np.random.Generator) -> Columns:
    scores["A"][1:] -= 0.1
    return scores


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return run(0).save(tmp_path / "clean.safetensors")


@pytest.fixture
def fault(tmp_path: Path) -> Path:
    return run(1, change=lowered).save(tmp_path / "fault.safetensors")


def test_a_clean_run_exits_with_0(clean: Path) -> None:
    result = invoke("judge", clean)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("agree: ")
    for expected in ("A-B0", "B0-C0", "A-C0", "repeats of B", "what it does to training", "next:"):
        assert expected in result.output


def test_a_fault_exits_with_1_and_is_named_first(fault: Path) -> None:
    result = invoke("judge", fault)
    assert result.exit_code == 1, result.output
    first = result.output.splitlines()[0]
    assert first.startswith("divergent: logprob on the rollout side: constant offset: A is lower")
    assert "response positions >= 1 of generation (A)" in result.output


def test_verbose_shows_positions_and_every_pairs_worst_tokens(fault: Path) -> None:
    result = invoke("judge", fault, "-v")
    assert "MAE by response position" in result.output
    for pair in ("A-B0", "B0-C0", "A-C0"):
        assert f"worst tokens of {pair}" in result.output


def test_unstable_exits_with_2_and_names_tokens(tmp_path: Path) -> None:
    def moves(scores: Columns, _: np.random.Generator) -> Columns:
        scores["B1"][22] -= 0.443738
        return scores

    path = run(2, change=moves).save(tmp_path / "moves.safetensors")
    result = invoke("judge", path)
    assert result.exit_code == 2
    assert result.output.startswith("unstable: repeats of B differ")
    assert "moved, B" in result.output and "-0.443738" not in result.output.splitlines()[0]
    assert invoke("judge", path, "--repeat-tolerance", 1).exit_code == 0


def test_json_is_a_verdict(fault: Path) -> None:
    result = invoke("judge", fault, "--json")
    verdict = json.loads(result.stdout)
    assert (result.exit_code, verdict["schema"], verdict["status"]) == (1, 1, "divergent")
    assert verdict["scores"]["pairs"][0]["name"] == "A-B0"
    assert verdict["culprits"][0]["operator"] == "logprob"


def test_several_files_are_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in range(2):
        record = run(number)
        calls = [
            Call.of(f"{number}-{c.name}", c.prompt, c.response, c.scores, group=c.group)
            for c in record
        ]
        ScoreRecord(record.info, calls).save(folder / f"{number}.safetensors")
    verdict = json.loads(invoke("judge", folder, "--json").stdout)
    assert verdict["scores"]["responses"] == 16


def test_runs_are_put_side_by_side(clean: Path, fault: Path, tmp_path: Path) -> None:
    fixed = run(3).save(tmp_path / "fixed.safetensors")
    result = invoke("compare", fault, fixed, "--control", clean)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("within: all ")
    result = invoke("compare", fixed, fault, "--control", clean)
    assert result.exit_code == 1 and result.output.startswith("out of range: ")
    result = invoke("compare", fault, fixed, "--json")
    assert (result.exit_code, json.loads(result.stdout)["status"]) == (2, "no control")


def test_bad_input_is_one_sentence_and_2(tmp_path: Path, clean: Path) -> None:
    text = tmp_path / "text.safetensors"
    text.write_text("nothing")
    one = ScoreRecord(
        RecordInfo(columns={"A": Scoring()}), [Call.of("one", [1], [2], {"A": [-1.0]})]
    ).save(tmp_path / "one.safetensors")
    cases: list[tuple[tuple[object, ...], str]] = [
        (("judge", tmp_path / "none.safetensors"), "there is no record"),
        (("judge", text), "no whole safetensors file"),
        (("judge", one), "two of A, B0 and C0 are needed"),
        (("judge", clean, "--tolerance", "0"), "tolerance is 0"),
        (("judge",), "Missing argument"),
        (("collect", "http://127.0.0.1:9", "--out", tmp_path / "r"), "give either --prompts"),
        (("trainer", clean, "--model", tmp_path), "config.json"),
    ]
    for arguments, message in cases:
        result = invoke(*arguments)
        assert result.exit_code == 2, arguments
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and message in errors[0], (arguments, result.stderr)


def test_a_worker_that_is_down_is_named(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[1, 2, 3]\n")
    out = tmp_path / "run.safetensors"
    result = invoke("collect", "http://127.0.0.1:9", "--prompts", prompts, "--out", out)
    assert result.exit_code == 2 and "http://127.0.0.1:9" in result.stderr
    assert not out.exists()
