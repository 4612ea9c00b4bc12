"""`layerbisect scores` and `weights` end to end: a real SGLang server, a transformers model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from layerbisect.captures.record.file import ScoreRecord
from layerbisect.cli import main
from layerbisect.models import make_tiny
from tests.sglang_server import sglang_installed, sglang_server

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed"),
]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def flattened(directory: Path, seed: int) -> Path:
    """A model whose rounding stays below the default tolerance."""
    make_tiny(directory, "qwen3", seed=seed, layers=2, hidden=64, heads=4, kv_heads=2, vocab=512)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] *= 0.3
    save_file(tensors, path, {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy before an update and after it."""
    folder = tmp_path_factory.mktemp("policies")
    return flattened(folder / "t0", 0), flattened(folder / "t1", 1)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "weights"


@pytest.fixture(scope="module")
def url(models: tuple[Path, Path], snapshots: Path) -> Iterator[str]:
    with sglang_server(models[0], environment={"LAYERBISECT_WEIGHTS": str(snapshots)}) as server:
        yield f"http://127.0.0.1:{server.port}"


def test_from_prompts_to_an_update(
    url: str, models: tuple[Path, Path], snapshots: Path, tmp_path: Path
) -> None:
    before, after = models
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps([n, 7, 9, 11 * n, 5]) for n in range(1, 5)))
    run = tmp_path / "t0.safetensors"
    done = invoke("scores", "collect", url, "--prompts", prompts, "--out", run)
    assert done.exit_code == 0, done.output
    assert ScoreRecord.open(run).columns == ("A", "B0", "B1")
    done = invoke("scores", "trainer", run, "--model", before)
    assert done.exit_code == 0, done.output
    done = invoke("scores", "judge", run)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("agree: ")

    # the trainer has gone on, and the server has not
    skipped = tmp_path / "skipped.safetensors"
    done = invoke("scores", "carry", run, url, "--model", after, "--out", skipped)
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("divergent: weights on the rollout side: ")
    newest = sorted(snapshots.iterdir())[-1]
    done = invoke("weights", newest, after, "--previous", before)
    assert done.exit_code == 1, done.output
    assert "stale on the rollout side" in done.stdout.splitlines()[0]

    installed = tmp_path / "t1.safetensors"
    done = invoke(
        "scores", "carry", run, url, "--model", after, "--out", installed,
        "--install", "--weight-version", "T1",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    newest = sorted(snapshots.iterdir())[-1]
    done = invoke("weights", newest, after)
    assert done.exit_code == 0, done.output
