"""`layerbisect weights`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from layerbisect.captures.weights.format import Part, SnapshotInfo
from layerbisect.captures.weights.snapshot import write_rank
from layerbisect.cli import main
from tests.bisect.weight_diff.making import make_weights, updated, write_checkpoint

W = make_weights()
U = updated(W)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["weights", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints ``old`` and ``new``, and ``server``, a snapshot of a server that is stale."""
    made = tmp_path_factory.mktemp("weights")
    write_checkpoint(made / "old", W)
    write_checkpoint(made / "new", U)
    held = dict(U)
    for name in (n for n in W if ".experts." in n):
        held[name] = W[name]
    held["model.layers.1.self_attn.k_norm.weight"] = torch.full((16,), torch.nan).bfloat16()
    info = SnapshotInfo("sglang", "0", "rollout", "bfloat16", 1, True, weight_version="step-7")
    write_rank(made / "server", info, 0, [Part.of(n, x) for n, x in held.items()])
    for number in ("000", "001"):
        write_rank(made / "taken" / number, info, 0, ())
    write_checkpoint(made / "numbered", W)
    file = made / "numbered" / "model.safetensors"
    file.rename(file.with_name("model-00001-of-00002.safetensors"))
    write_checkpoint(made / "listed", W)
    (made / "listed" / "model.safetensors.index.json").write_text('{"weight_map": null}')
    return made


def test_equal_weights_agree(folder: Path) -> None:
    done = run(folder / "new", folder / "new")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("agree: all 66 tensors are the same\n")
    assert "66 tensors compared" in done.stdout and done.stderr == ""
    assert not any(line.endswith(" ") for line in done.stdout.split("\n"))


def test_faults_are_told_not_tensors(folder: Path) -> None:
    done = run(folder / "server", folder / "new", "--previous", folder / "old")
    assert done.exit_code == 1, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "divergent: 1 tensor not loaded on the rollout side: layer 1 self_attn.k_norm; "
        "and 1 more fault"
    )
    assert lines[1] == "  weight versions: rollout step-7"
    (stale,) = [line for line in lines if "stale: equal to the previous weights" in line]
    assert stale.split()[:3] == ["36", "0.00089", "rollout"]
    assert lines[lines.index(stale) + 1].strip() == "layers 0-2 mlp.experts.0-3.*"
    assert "experts.3." not in done.stdout
    assert max(map(len, lines)) <= 100


def test_half_a_model_is_no_agreement(folder: Path, tmp_path: Path) -> None:
    half = write_checkpoint(tmp_path / "half", {n: x for n, x in W.items() if ".layers.0" in n})
    done = run(half, folder / "old")
    assert done.exit_code == 1
    assert done.stdout.startswith(
        "divergent: 45 tensors missing on the rollout side: layers 1-2 input_layernorm, mlp.exp"
    )
    assert "on trainer alone:" not in done.stdout
    write_checkpoint(tmp_path / "more", W | {"model.extra.weight": torch.ones(3)})
    done = run(tmp_path / "more", folder / "old")
    assert done.stdout.startswith("divergent: 1 tensor missing on the trainer side: model.extra\n")


def test_a_missing_rank_is_told_once(folder: Path, tmp_path: Path) -> None:
    info = SnapshotInfo("sglang", "0", "rollout", "bfloat16", 2, True)
    parts = [
        Part.of(n, x[: len(x) // 2], {0: (0, len(x) // 2, len(x))})
        if x.ndim == 2
        else Part.of(n, x)
        for n, x in W.items()
    ]
    write_rank(tmp_path / "s", info, 0, parts)
    done = run(tmp_path / "s", folder / "old")
    lines = done.stdout.splitlines()
    assert done.exit_code == 2 and len(lines) < 16, done.stdout
    assert lines[0].startswith("inconclusive: rank 1 of 2 wrote nothing into")
    (said,) = [line for line in lines if "could not be compared: " in line]
    assert said.strip().startswith("53 tensors could not be compared: layers 0-2 mlp.experts.0-3.*")
    assert done.stdout.count("do not tile") == 1


def test_one_tensor_is_one(folder: Path, tmp_path: Path) -> None:
    one = {"model.norm.weight": W["model.norm.weight"]}
    write_checkpoint(tmp_path / "a", one)
    assert run(tmp_path / "a", tmp_path / "a").stdout.startswith("agree: the one tensor is the")
    write_checkpoint(tmp_path / "b", {n: x.roll(1) for n, x in one.items()})
    assert "divergent: 1 tensor differs (" in run(tmp_path / "a", tmp_path / "b").stdout


def test_verbose_names_each_tensor(folder: Path) -> None:
    done = run(folder / "server", folder / "new", "--previous", folder / "old", "-v")
    assert "model.layers.2.mlp.experts.3.down_proj.weight" in done.stdout


def test_json_is_the_contract(folder: Path) -> None:
    done = run(folder / "server", folder / "new", "--previous", folder / "old", "--json")
    verdict = json.loads(done.stdout)
    assert done.exit_code == 1 and verdict["status"] == "divergent"
    assert [c["operator"] for c in verdict["culprits"]] == ["weights", "weights"]
    assert verdict["weights"]["versions"] == {"rollout": "step-7", "trainer": None}


def test_without_a_third_holder_the_next_step_is_to_name_one(folder: Path) -> None:
    done = run(folder / "old", folder / "new")
    assert "53 tensors differ (drift; which side is off is not known): layers" in done.stdout
    assert f"next: layerbisect weights {folder / 'old'} {folder / 'new'} --previous" in done.stdout


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_what_cannot_be_compared_is_one_sentence(
    folder: Path, tmp_path: Path, as_json: bool
) -> None:
    extra = ["--json"] if as_json else []
    for bad, said in (
        (folder / "nowhere", "is no directory; give that of a checkpoint or of a weight snapshot"),
        (tmp_path, "no safetensors file in"),
        (folder / "taken", "holds 2 weight snapshots (000 to 001); name one, such as "),
        (folder / "numbered", "holds 1 of 2 files called model-*-of-00002.safetensors; number 2"),
        (folder / "listed", "cannot read "),
    ):
        done = run(bad, folder / "new", *extra)
        assert done.exit_code == 2
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert said in done.stderr
        assert (json.loads(done.stdout)["status"] == "inconclusive") if as_json else not done.stdout


def test_nothing_in_common_cannot_be_judged(folder: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "o", {"wte.weight": W["model.embed_tokens.weight"]})
    done = run(other, folder / "new")
    assert done.exit_code == 2
    assert done.stdout.startswith("inconclusive: no tensor could be compared")
