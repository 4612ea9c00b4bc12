"""The demo: what it plants is found, and a wrong verdict is called wrong."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from layerbisect.bisect import locate
from layerbisect.bisect.verdict import Coverage, CoveredRows, Culprit, Points, Verdict
from layerbisect.captures.errors import LayerBisectError
from layerbisect.cli import main
from layerbisect.demo import judged, run_demo
from layerbisect.faults import FAULTS, Truth

TRUTH = Truth("rope-shifted", 2, "rope", "layers.2.attn.q")
RIGHT = Culprit(2, "layers.2.attn.q", "rope", "rollout", 0.8, 160.0, 1.1, "all rows", ())


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["demo", *map(str, arguments)])


@pytest.fixture
def empty() -> Verdict:
    """A verdict that agrees, for tests to change."""
    coverage = Coverage(Points(0, ()), CoveredRows(0, 0))
    return Verdict("agree", None, (), (), None, coverage, "", ("no reason",))


def convicting(verdict: Verdict, *culprits: Culprit) -> Verdict:
    return dataclasses.replace(verdict, status="divergent", culprits=culprits)


@pytest.mark.parametrize(
    "changes, mistakes",
    [
        ([{}], []),
        ([{}, {"point": "layers.2.attn.k"}], []),
        ([{"layer": 3}], ["the layer is 3, not 2"]),
        ([{"operator": "norm"}], ["the operator is norm, not rope"]),
        ([{"operator": None}], ["the operator is None, not rope"]),
        ([{"side": "both"}], ["the side is both, not rollout"]),
        ([{}, {"layer": 1, "point": "layers.1.mid"}], ["layers.1.mid is innocent"]),
        ([], ["nobody is convicted: the verdict is 'divergent'"]),
    ],
)
def test_all_that_is_convicted_must_be_what_was_planted(
    empty: Verdict, changes: list[dict[str, Any]], mistakes: list[str]
) -> None:
    verdict = convicting(empty, *(dataclasses.replace(RIGHT, **c) for c in changes))
    outcome = judged(verdict, TRUTH, "rollout")
    assert outcome.mistakes() == mistakes
    assert outcome.right is (not mistakes)
    assert outcome.exit_code == (2 if mistakes else 1)


def test_agreement_is_right_where_nothing_was_planted_and_wrong_where_something_was(
    empty: Verdict,
) -> None:
    assert judged(empty, None, "rollout").exit_code == 0
    assert judged(empty, TRUTH, "rollout").exit_code == 2
    outcome = judged(convicting(empty, RIGHT), None, "rollout")
    assert outcome.exit_code == 2
    assert outcome.mistakes() == ["nothing was planted, and the verdict is 'divergent'"]


def test_a_planted_fault_is_found_and_kept(small_moe_dir: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = run("--model", small_moe_dir, "--fault", "rope-shifted", "--layer", "2", "--keep", kept)
    assert done.exit_code == 1, done.output
    first, *_, _, last = done.stdout.rstrip("\n").split("\n")
    assert first.startswith("divergent: layers.2.attn.q (rope) on the rollout side")
    assert last == "the verdict is right: layer, operator and side"
    assert "planted: `rope-shifted` in layer 2 on the rollout side" in done.stdout
    _, *lines = done.stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith("    layerbisect ")) <= 100
    assert f"kept in {kept}" in done.stderr
    assert sorted(p.name for p in kept.iterdir()) == ["rollout", "tokens.jsonl", "trainer"]

    # what is kept can be judged again, by the command that a user has
    command = ["bisect", str(kept / "rollout"), str(kept / "trainer"), "--model"]
    again = CliRunner().invoke(main, [*command, str(small_moe_dir), "--json"])
    assert again.exit_code == 1
    verdict = json.loads(again.stdout)
    assert verdict["schema"] == 1 and verdict["status"] == "divergent"
    (culprit,) = verdict["culprits"]
    assert (culprit["layer"], culprit["operator"], culprit["side"]) == (2, "rope", "rollout")

    taken = run("--keep", kept)
    assert taken.exit_code == 2 and "is not empty: name a new directory" in taken.stderr


def test_nothing_planted_is_rounding(small_moe_dir: Path) -> None:
    done = run("--model", small_moe_dir, "--fault", "none", "--json")
    assert done.exit_code == 0, done.output
    verdict = json.loads(done.stdout)
    assert verdict["status"] == "agree" and verdict["culprits"] == []
    assert verdict["demo"] == {"planted": None, "right": True, "mistakes": []}
    # its size by layer
    assert [layer["layer"] for layer in verdict["layers"]] == [0, 1, 2, 3]
    assert all(layer["carried_out"] > 0 for layer in verdict["layers"])
    assert 0 < verdict["gap"]["mae"] <= 1.5 * verdict["rounding_budget"]["predicted_gap"]


def test_the_locator_sees_captures_and_model_and_no_truth(
    small_moe_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    bisect = locate.bisect

    def watching(rollout: Path, trainer: Path, **options: Any) -> Verdict:
        assert set(options) == {"model", "progress"}
        for folder in (rollout, trainer):
            for path in folder.rglob("*"):
                if path.suffix == ".json":
                    seen.append(path.read_text())
        return bisect(rollout, trainer, **options)

    monkeypatch.setattr(locate, "bisect", watching)
    outcome = run_demo(fault="softmax-scale", layer=1, side="trainer", model=small_moe_dir)
    assert outcome.right, outcome.mistakes()
    assert outcome.planted is not None and outcome.planted.side == "trainer"
    assert seen and not any("softmax" in text for text in seen)


def test_a_wrong_verdict_is_said_to_be_wrong(
    small_moe_dir: Path, monkeypatch: pytest.MonkeyPatch, empty: Verdict
) -> None:
    wrong = convicting(empty, dataclasses.replace(RIGHT, layer=3, side="trainer"))
    monkeypatch.setattr(locate, "bisect", lambda *arguments, **options: wrong)
    done = run("--model", small_moe_dir, "--layer", "2")
    assert done.exit_code == 2
    assert done.stdout.rstrip().endswith(
        "the verdict is WRONG: the layer is 3, not 2; the side is trainer, not rollout"
    )


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    "options, said",
    [
        (["--layer", "4"], "needs a layer from 0 to 3, got 4"),
        (["--fault", "nix"], "unknown fault 'nix': give none or one of norm-eps"),
    ],
)
def test_what_cannot_be_planted_leaves_nothing(
    small_moe_dir: Path, tmp_path: Path, options: list[str], said: str, existing: bool
) -> None:
    kept = tmp_path / "kept"
    if existing:
        kept.mkdir()
    done = run("--model", small_moe_dir, "--keep", kept, *options)
    assert done.exit_code == 2 and said in done.stderr and done.stdout == ""
    assert kept.exists() is existing and not list(tmp_path.rglob("*.json*"))


def test_a_dense_model_has_no_experts_to_swap(small_qwen3_dir: Path) -> None:
    with pytest.raises(LayerBisectError, match="needs a layer with experts"):
        run_demo(fault="experts-swapped", model=small_qwen3_dir)


def test_faults_are_listed() -> None:
    listed = run("--fault", "list")
    assert listed.exit_code == 0
    helped = run("--help").stdout
    for name, fault in FAULTS.items():
        assert name in listed.stdout and name in helped
        assert fault.description in " ".join(listed.stdout.split())
    faults = json.loads(run("--fault", "list", "--json").stdout)["faults"]
    assert [f["name"] for f in faults] == list(FAULTS)


@pytest.mark.slow
def test_the_demo_as_it_is_finds_its_fault() -> None:
    done = run()
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("divergent: layers.8.attn.q (rope) on the rollout side")
    assert "the verdict is right" in done.stdout
