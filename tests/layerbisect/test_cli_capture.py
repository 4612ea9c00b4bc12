"""`layerbisect capture` and `layerbisect show`."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from layerbisect import Capture
from layerbisect.captures import transformers_capture
from layerbisect.cli import main
from layerbisect.token_file import TokenSequence, read_tokens

IDS = [[1, 17, 300, 4, 99, 2], [5, 5, 5], [511]]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.jsonl"
    named = {"ids": IDS[0], "name": "first", "prompt_length": 3}
    # blank lines are no sequences
    lines = [json.dumps(named), "", json.dumps(IDS[1]), json.dumps({"ids": IDS[2]}), ""]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "capture"


def test_tokens_are_read_with_names_and_prompt_lengths(tokens: Path) -> None:
    assert read_tokens(tokens, vocab=512) == (
        TokenSequence("first", tuple(IDS[0]), 3),
        TokenSequence("s1", tuple(IDS[1])),
        TokenSequence("s2", tuple(IDS[2])),
    )


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "holds no sequence; give one JSON list of token IDs a line"),
        ("[1, 2", "line 1 is not JSON: Expecting ',' delimiter"),
        ("[1]\n7", "line 2 holds 7; give a list of token IDs, or an object with ids"),
        ('{"name": "a"}', 'line 1 holds {"name": "a"}; give a list'),
        ('{"ids": [1], "prompt": 1}', "line 1 has 'prompt'; the keys are ids, prompt_ids, name, "),
        ('{"ids": [1], "name": 3}', "line 1 has the name 3; give a text"),
        ('{"ids": [1], "name": "s1"}\n[2]', "line 2 has the name 's1', which line 1 has too"),
        ("[]", "line 1 holds no token"),
        ("[1]\n[1, 512]", "line 2 has 512 at position 1; token IDs of this model are whole"),
        ("[-1]", "line 1 has -1 at position 0"),
        ("[1.0]", "line 1 has 1.0 at position 0"),
        ("[true]", "line 1 has True at position 0"),
        ("[null]", "line 1 has None at position 0"),
        ('{"ids": [1, 2], "prompt_length": 3}', "line 1 has prompt_length 3; give a number from 1"),
        ('{"ids": [1, 2], "prompt_length": true}', "line 1 has prompt_length True"),
        (json.dumps([1] * 4097), "line 1 has 4,097 tokens; the model has 4,096 positions"),
        ("[" * 100000, "line 1 is not JSON"),
    ],
    ids=lambda value: value[:20],
)
def test_a_bad_token_file_is_refused_before_anything_is_made(
    tmp_path: Path, small_moe_dir: Path, out: Path, text: str, said: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    done = run("capture", "--model", small_moe_dir, "--tokens", path, "--out", out)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert said in done.stderr and done.stderr.startswith(f"error: {path} ")
    assert done.stderr.count("\n") == 1
    assert not out.parent.exists()


def test_a_capture_is_made_and_shown(small_moe_dir: Path, tokens: Path, out: Path) -> None:
    done = run("capture", "--model", small_moe_dir, "--tokens", tokens, "--out", out)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{out}\n"
    assert done.stderr.startswith("captured 10 rows of 3 sequences at 6 points")
    capture = Capture.open(out)
    assert capture.finished and capture.label == "trainer"
    assert [s.name for s in capture.sequences] == ["first", "s1", "s2"]
    assert capture.rows.token.tolist() == sum(IDS, [])
    assert set(capture.phases) == {"forward"}
    assert capture.info.environment["attn_implementation"] == "sdpa"
    # the score of each token but the first of its sequence
    assert len(capture.scores.rows) == 10 - 3

    page = run("show", out).stdout
    assert page.startswith(f"trainer: capture of 3 sequences, finished, in {out}\n")
    assert "transformers" in page and "layers.*.input" in page and "0-3" in page
    assert "3 forward passes of 10 rows" in page
    assert max(map(len, page.splitlines()[1:])) <= 100

    summary = json.loads(run("show", out, "--json").stdout)
    assert summary["schema"] == 1 and summary["rows"] == 10
    assert [s["length"] for s in summary["sequences"]] == [6, 3, 1]


def test_points_are_shown_with_the_range_of_their_values(
    small_moe_dir: Path, tokens: Path, out: Path
) -> None:
    done = run(
        "capture", "--model", small_moe_dir, "--tokens", tokens, "--out", out,
        "--points", "layers.2", "--dtype", "float32", "--attention", "eager", "--label", "mine",
        "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["label"] == "mine" and made["dtype"] == "float32" and done.stderr == ""

    shown = json.loads(run("show", out, "--point", "layers.2.attn.*", "--json").stdout)["points"]
    names = [p["name"] for p in shown]
    assert names == [f"layers.2.attn.{p}" for p in ("norm", "q", "k", "v", "context", "out")]
    values = Capture.open(out).read("layers.2.attn.q")
    (q,) = [p for p in shown if p["name"].endswith(".q")]
    assert q["shape"] == [4, 32] and q["rows"] == 10 and q["nonfinite"] == 0
    assert q["smallest"] == pytest.approx(float(values.min()))
    assert q["largest"] == pytest.approx(float(values.max()))
    assert q["rms"] == pytest.approx(float(np.sqrt(np.square(values.astype(float)).mean())))

    page = run("show", out, "--point", "layers.2.mlp.*").stdout
    assert "layers.2.mlp.expert_ids" in page and "layers.2.attn.q" not in page
    missing = run("show", out, "--point", "layers.1.*")
    assert missing.exit_code == 2 and "has no point that matches 'layers.1.*'" in missing.stderr


def test_a_rollout_is_decoded_from_its_prompt(
    small_moe_dir: Path, tmp_path: Path, tokens: Path, out: Path
) -> None:
    command = ("capture", "--model", small_moe_dir, "--decode-from-prompt", "--out", out)
    lacking = run(*command, "--tokens", tokens)
    assert lacking.exit_code == 2 and "'s1' has none" in lacking.stderr
    assert not out.exists()
    path = tmp_path / "prompts.jsonl"
    lines = [{"ids": IDS[0], "prompt_length": 4}, {"ids": IDS[1], "prompt_length": 1}]
    path.write_text("\n".join(map(json.dumps, lines)))
    done = run(*command, "--tokens", path)
    assert done.exit_code == 0, done.stderr
    capture = Capture.open(out)
    assert capture.label == "rollout"
    phases = list(zip(capture.rows.position.tolist(), capture.phases.tolist(), strict=True))
    assert [p for p, phase in phases if phase == "decode"] == [4, 5, 1, 2]
    assert bool(capture.keys.known.all()) and len(capture.rows) == 9


@pytest.mark.parametrize(
    "options, said",
    [
        (["--points", "layers.4"], "no point matches 'layers.4' in a model of 4 layers"),
        (["--points", "nix,all"], "no point matches 'nix'"),
        (["--device", "cuda:99"], "cannot use device 'cuda:99'"),
        (["--device", "nix"], "cannot use device 'nix'"),
        (["--dtype", "int8"], "Invalid value for '--dtype'"),
    ],
)
def test_bad_options_leave_nothing(
    small_moe_dir: Path, tokens: Path, out: Path, options: list[str], said: str
) -> None:
    done = run("capture", "--model", small_moe_dir, "--tokens", tokens, "--out", out, *options)
    assert done.exit_code == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not out.parent.exists()


def _no_config(model: Path) -> None:
    (model / "config.json").unlink()


def _no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _truncated(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _another_size(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))


def _unknown(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "nix"}))


@pytest.mark.parametrize(
    "damage, said",
    [
        (_no_config, "no config.json in "),
        (_no_weights, "no safetensors file in "),
        (_truncated, "model.safetensors"),
        # transformers alone would draw the missing layer at random
        (_another_size, "do not fit its config.json: missing keys 'model.layers.4."),
        (_unknown, "transformers cannot load "),
    ],
)
def test_a_model_directory_that_does_not_fit_is_refused(
    small_moe_dir: Path, tmp_path: Path, tokens: Path, out: Path, damage: Any, said: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(small_moe_dir, model)
    damage(model)
    done = run("capture", "--model", model, "--tokens", tokens, "--out", out)
    assert done.exit_code == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert not out.parent.exists()


def test_a_directory_in_use_is_left_alone(
    small_moe_dir: Path, tmp_path: Path, tokens: Path, out: Path
) -> None:
    command = ("capture", "--model", small_moe_dir, "--tokens", tokens, "--out")
    assert run(*command, out).exit_code == 0
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    again = run(*command, out)
    assert again.exit_code == 2 and "already holds a capture" in again.stderr
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    assert run(*command, tokens).exit_code == 2
    other = run(*command, tmp_path)
    assert other.exit_code == 2 and f"{tmp_path} is not empty" in other.stderr


@pytest.mark.parametrize("passes", [0, 1])
def test_what_breaks_off_leaves_its_finished_passes_or_nothing(
    small_moe_dir: Path, tokens: Path, out: Path, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = transformers_capture.ModelCapture._begin
    calls = 0

    def breaking(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > passes:
            raise KeyboardInterrupt
        begin(*arguments)

    monkeypatch.setattr(transformers_capture.ModelCapture, "_begin", breaking)
    done = run("capture", "--model", small_moe_dir, "--tokens", tokens, "--out", out)
    assert done.exit_code == 130
    if not passes:
        assert not out.exists()
        return
    page = run("show", out)
    assert page.exit_code == 0
    assert "NOT WHOLE" in page.stdout and "problem: the capture was not finished" in page.stdout
    assert len(Capture.open(out).rows) == len(IDS[0])


def test_show_refuses_what_is_no_capture(tmp_path: Path) -> None:
    done = run("show", tmp_path)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {tmp_path} holds no capture")
    failed = json.loads(run("show", tmp_path / "nix", "--json").stdout)
    assert failed["status"] == "inconclusive" and "holds no capture" in failed["reasons"][0]
