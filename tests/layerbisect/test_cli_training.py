"""`layerbisect capture --forward training` and `layerbisect training`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from layerbisect.captures.store import Capture
from layerbisect.cli import main
from layerbisect.models import make_tiny

VOCAB = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        tmp_path_factory.mktemp("model") / "tiny",
        "qwen3_moe",
        layers=3,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        experts=8,
        top_k=2,
        vocab=VOCAB,
    )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("tokens") / "answers.jsonl"
    # one token alone has no log-prob to go backward from
    lines = [[draw.randrange(VOCAB) for _ in range(n)] for n in (20, 14, 1)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def taken(capsys: pytest.CaptureFixture[str], model: Path, *more: object) -> Path:
    code, out, err = run(capsys, "capture", "--model", model, "--points", "all", *more)
    assert code == 0, err
    return Path(out.strip())


def test_from_checkpoint_to_agreement(
    model: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--tokens", tokens, "--out")
    frozen = taken(capsys, model, *common, tmp_path / "frozen")
    training = taken(
        capsys, model, *common, tmp_path / "training", "--forward", "training", "--recompute"
    )
    capture = Capture.open(training)
    assert capture.label == "training" and not capture.problems
    assert capture.modes[0].training and capture.modes[0].gradients and capture.recomputed
    code, out, _ = run(capsys, "training", frozen, training, "--recompute")
    assert code == 0
    assert out.startswith("agree: the training forward repeats the frozen one bit for bit")
    assert "the backward computes the same again, bit for bit" in out
    code, out, _ = run(capsys, "show", training)
    assert "3 forward passes of 35 rows, 3 recompute passes of 35 rows" in out
    assert "train mode, with gradients, gradient_checkpointing" in out


def test_dropout_of_a_checkpoints_config_is_named_within_100_columns(
    model: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dropping = tmp_path / "dropping"
    dropping.mkdir()
    for path in model.iterdir():
        (dropping / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_text()) | {"attention_dropout": 0.1}
    (dropping / "config.json").unlink()
    (dropping / "config.json").write_text(json.dumps(config))
    common = ("--tokens", tokens, "--out")
    frozen = taken(capsys, dropping, *common, tmp_path / "frozen")
    training = taken(capsys, dropping, *common, tmp_path / "training", "--forward", "training")
    code, out, _ = run(capsys, "training", frozen, training)
    assert code == 1
    first, _, rest = out.partition("\n")
    assert first.startswith("divergent: layers.0.attn.context is where they part: dropout")
    assert "next: set the dropout of model.layers.0.self_attn to 0" in rest
    assert max(map(len, rest.splitlines())) <= 100
    verbose = run(capsys, "training", frozen, training, "-v")[1]
    assert "layers.2.output" in verbose and "layers.2.output" not in out
    code, out, _ = run(capsys, "training", frozen, training, "--json")
    data: dict[str, Any] = json.loads(out)
    assert (code, data["status"], data["causes"][0]["kind"]) == (1, "divergent", "dropout")
    code, out, _ = run(capsys, "training", frozen, training, "--recompute")
    assert code == 2 and out.startswith("inconclusive: no recomputation was seen")


def test_what_cannot_be_is_refused(
    model: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("capture", "--model", model, "--tokens", tokens, "--out", tmp_path / "c")
    for more, sentence in (
        (("--recompute",), "--recompute needs --forward training"),
        (("--forward", "training", "--routes", tmp_path), "--routes has no gradients"),
        (("--forward", "training", "--decode-from-prompt"), "has no gradients"),
    ):
        code, _, err = run(capsys, *common, *more)
        assert code == 2 and sentence in err
    assert not (tmp_path / "c").exists()
    code, _, err = run(capsys, "training", tmp_path / "none", tmp_path / "none")
    assert code == 2 and "holds no capture" in err
