"""An exported program needs torch alone, and prints the figures of `layerbisect replay`."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from layerbisect.bisect.chosen_bundles import choose
from layerbisect.captures.errors import LayerBisectError
from layerbisect.cli import main
from layerbisect.export import write_export
from layerbisect.kernels.replay.bundle import Bundle, load_bundle
from layerbisect.kernels.replay.replayer import replay
from layerbisect.repro_template import read_bundle
from tests.bisect.making import Engine, random_tokens
from tests.layerbisect.test_standalone import free_names

NAMES = ("reference", "torch")
# all that layerbisect needs or knows besides torch
BLOCKED = (
    "layerbisect",
    "numpy",
    "safetensors",
    "click",
    "rich",
    "httpx",
    "transformers",
    "triton",
    "sglang",
)
ALONE = (
    "import runpy, sys\n"
    "program, *arguments, blocked = sys.argv[1:]\n"
    "for name in blocked.split(): sys.modules[name] = None\n"
    "sys.argv[:] = [program, *arguments]\n"
    "runpy.run_path(program, run_name='__main__')\n"
)


def alone(
    program: Path, *arguments: str, blocked: Sequence[str] = BLOCKED
) -> subprocess.CompletedProcess[str]:
    """Run a program where nothing of what is blocked can be imported."""
    return subprocess.run(
        # torch itself warns where there is no numpy
        [
            sys.executable,
            "-I",
            "-W",
            "ignore:Failed to init",
            "-c",
            ALONE,
            str(program),
            *arguments,
            " ".join(blocked),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def captured(small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture with the softmax scale of layer 1 off, and with the MLP norm's weight wrong."""
    folder = tmp_path_factory.mktemp("captured") / "rollout"
    faults = [("softmax-scale", 1), ("norm-weight", 1)]
    engine = Engine.load(small_moe_dir, "rollout")
    return engine.capture(folder, random_tokens(512, [40, 40]), faults=faults)


@pytest.fixture(scope="module")
def exported(captured: Path, small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `layerbisect replay --export` printed of the convicted attention, and where it wrote."""
    folder = tmp_path_factory.mktemp("exported") / "new"
    arguments = [
        "replay", captured, "--model", small_moe_dir, "--layer", 1, "--operator", "attention",
        "--implementation", "reference", "--implementation", "torch", "--export", folder,
        "--device", "cpu", "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    assert done.exit_code == 1, done.output
    return json.loads(done.stdout), folder


def figures(one: dict[str, Any]) -> dict[str, Any]:
    """All but the name of the package, which each reads where it finds it."""
    results = [{k: v for k, v in r.items() if k != "package"} for r in one["results"]]
    return {**one, "results": results}


def test_it_prints_the_same_figures_with_torch_alone(exported: Any) -> None:
    said, folder = exported
    assert sorted(path.name for path in folder.iterdir()) == ["bundle.safetensors", "repro.py"]
    assert said["exported"] == [str(folder / "repro.py")]
    done = alone(folder / "repro.py", "--json", "--device", "cpu")
    assert done.returncode == 1 and done.stderr == ""
    assert figures(json.loads(done.stdout)) == figures(said["replays"][0])
    (replayed,) = said["replays"]
    assert replayed["status"] == "convicted" and replayed["engine"]["fits"]
    assert [one["name"] for one in replayed["results"]] == list(NAMES)


def test_its_page_has_the_cells_of_the_command_s_table(exported: Any) -> None:
    _, folder = exported
    done = alone(folder / "repro.py")
    assert done.returncode == 1 and done.stderr == ""
    bundle = folder / "bundle.safetensors"
    names = [f"--implementation={name}" for name in NAMES]
    page = CliRunner().invoke(main, ["replay", str(bundle), "--device", "cpu", *names]).stdout
    rows = [rows_of(text) for text in (done.stdout, page)]
    assert rows[0] == rows[1] and rows[0].keys() == set(NAMES)
    # the sentence, and the figures of the engine
    assert done.stdout.splitlines()[0] == page.splitlines()[0]
    engine = re.search(r"error [\d.]+x rounding at the median", done.stdout)
    assert engine is not None and engine[0] in page


def rows_of(text: str) -> dict[str, list[str]]:
    lines = [line.removeprefix("  ").lstrip("> ").split() for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines if line and line[0] in NAMES}


def test_its_top_says_what_it_is_and_what_was_found(exported: Any) -> None:
    said, folder = exported
    text = (folder / "repro.py").read_text()
    doc = ast.get_docstring(ast.parse(text)) or ""
    assert doc.startswith("layers.1.attn.context, replayed on the input that an engine captured.")
    assert "It needs\ntorch alone:" in doc or "It needs torch alone:" in doc.replace("\n", " ")
    assert said["replays"][0]["conclusion"][:40] in doc.replace("\n      ", " ")
    assert max(map(len, doc.splitlines())) <= 100
    assert rows_of(doc) == rows_of(alone(folder / "repro.py").stdout)


def test_what_is_broken_is_told_in_a_sentence(exported: Any, tmp_path: Path) -> None:
    _, folder = exported
    done = alone(folder / "repro.py", str(tmp_path / "nothing"))
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    done = alone(folder / "repro.py", str(tmp_path / "other.safetensors"))
    assert done.returncode == 2 and "so no operator bundle" in done.stderr


def test_its_reader_reads_what_safetensors_reads(exported: Any) -> None:
    path = exported[1] / "bundle.safetensors"
    ours, theirs = read_bundle(path), load_bundle(path)
    for group in ("inputs", "weights", "captured"):
        one, other = getattr(ours, group), getattr(theirs, group)
        assert one.keys() == other.keys()
        assert all(one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one)
    assert torch.equal(ours.observed, theirs.observed) and ours.calls == theirs.calls


def test_a_triton_form_goes_along(exported: Any, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    bundle, name = exported[1] / "bundle.safetensors", "triton-deterministic"
    arguments = ["replay", bundle, "--implementation", name, "--export", tmp_path / "new"]
    done = CliRunner().invoke(main, [str(a) for a in arguments] + ["--device", "cpu", "--json"])
    assert done.exit_code == 1, done.output
    program = tmp_path / "new" / "repro.py"
    assert "It needs torch and triton:" in " ".join(program.read_text().split())
    needed = ("triton", "numpy")
    again = alone(program, "--json", blocked=[n for n in BLOCKED if n not in needed])
    assert again.returncode == 1, again.stderr
    results = {one["name"]: one for one in figures(json.loads(again.stdout))["results"]}
    assert results.keys() == {*NAMES, name} and results[name]["state"] == "ran"
    (replayed,) = figures(json.loads(done.stdout)["replays"][0])["results"]
    assert results[name] == replayed


@pytest.fixture(scope="module")
def layer(captured: Path, small_moe_dir: Path) -> list[Bundle]:
    """One stretch of each kind."""
    kinds = ("attn.q", "attn.context", "mid", "mlp.norm", "mlp.expert_weights", "mlp.out")
    bundles = choose(captured, model=small_moe_dir, layer=1, rows=40).bundles
    return [one for one in bundles if one.point.removeprefix("layers.1.") in kinds]


def test_every_stretch_has_a_program_of_its_own(layer: list[Bundle], tmp_path: Path) -> None:
    replays = [replay(bundle, names=NAMES, isolate=False, repeats=2) for bundle in layer]
    programs = write_export(tmp_path / "all", layer, replays, (), "cpu")
    assert [path.parent.name for path in programs] == [bundle.point for bundle in layer]
    for path in programs:
        text = path.read_text()
        compile(text, str(path), "exec")
        assert free_names(text) == {"__file__"}
        assert re.search(r"^\s*(import|from) (layerbisect|numpy|safetensors)", text, re.M) is None
    # what it does not need is not there
    norm = (tmp_path / "all" / "layers.1.mlp.norm" / "repro.py").read_text()
    assert "def attention" not in norm and "import triton" not in norm
    done = alone(tmp_path / "all" / "layers.1.mlp.norm" / "repro.py", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["engine"]["convicted"]


def test_a_damaged_bundle_is_told_from_none(exported: Any, tmp_path: Path) -> None:
    raw = (exported[1] / "bundle.safetensors").read_bytes()
    for name, broken in (
        ("short", raw[:-100]),
        ("empty", b""),
        ("text", b"not a safetensors file"),
    ):
        (tmp_path / name).write_bytes(broken)
        with pytest.raises(LayerBisectError, match=f"{name} is no operator bundle"):
            read_bundle(tmp_path / name)


def test_nothing_is_overwritten(layer: list[Bundle], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(LayerBisectError, match="is there already"):
        write_export(tmp_path, layer[:1], [], (), "cpu")
    with pytest.raises(LayerBisectError, match="is there already"):
        write_export(tmp_path / "mine", layer[:1], [], (), "cpu")


def test_what_cannot_run_here_is_not_exported(layer: list[Bundle], tmp_path: Path) -> None:
    with pytest.raises(LayerBisectError, match="aiter can't be exported, for it can't run here"):
        write_export(tmp_path / "new", layer[:1], [], ("aiter",), "cpu")
    assert not (tmp_path / "new").exists()
