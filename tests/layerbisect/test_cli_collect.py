"""`layerbisect scores collect`, `trainer` and `carry` against a simulated worker."""

import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.cli import main
from layerbisect.models import make_tiny
from layerbisect.progress import ConsoleProgress, of_replays
from layerbisect.token_file import read_tokens
from tests.captures.simulated_worker import Raw, SimulatedWorker, simulated_worker
from tests.sglang_server import free_port

PAGE = Path(__file__).parents[2] / "docs" / "scores.md"
INSTALL = "/update_weights_from_disk"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["scores", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """Run what must end with one sentence and exit code 2, and return the sentence."""
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    return error.removeprefix("error: ")


@pytest.fixture
def served() -> Iterator[SimulatedWorker]:
    with simulated_worker() as worker:
        yield worker


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('[1, 2, 3]\n{"ids": [4, 5], "name": "sum"}\n{"prompt_ids": [7], "name": "c"}\n')
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    # nothing in a record's name says what it is
    return tmp_path / "new" / "run of mine"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--temperature", "nan", "nan is no finite number above 0"),
        ("--temperature", "inf", "inf is no finite number above 0"),
        ("--temperature", "-0.5", "-0.5 is no finite number above 0"),
        ("--temperature", "0", "0 is no finite number above 0"),
        ("--temperature", "hot", "'hot' is not a valid float"),
        ("--timeout", "nan", "nan is no finite number above 0"),
        ("--timeout", "1e300", "a timeout of 1e+300 s is none"),
        ("--step", "-1", "-1 is not in the range x>=0"),
        ("--samples", "x", "'x' is not a valid integer"),
        ("--replays", "0", "0 is not in the range x>=1"),
    ],
)
def test_a_number_that_cannot_be_is_named(
    served: SimulatedWorker, prompts: Path, out: Path, option: str, value: str, said: str
) -> None:
    error = refused("collect", served.url, "--prompts", prompts, "--out", out, option, value)
    assert said in error and "range" not in error.replace("in the range", "")
    assert not served.asked and not out.exists()


@pytest.mark.parametrize(
    "option",
    [("--samples", 2), ("--temperature", 1), ("--max-new-tokens", 8), ("--step", 3)]
    + [("--original-logprobs",)],
    ids=lambda option: str(option[0]),
)
def test_an_option_of_generation_beside_a_saved_rollout_is_refused(
    served: SimulatedWorker, tmp_path: Path, out: Path, option: tuple[object, ...]
) -> None:
    saved = tmp_path / "rollout.jsonl"
    saved.write_text('{"prompt_ids": [1], "response_ids": [2], "logprobs": [-0.5]}')
    arguments = ("collect", served.url, "--saved", saved, "--out", out)
    assert f"{option[0]} is of generation" in refused(*arguments, *option)
    assert not served.asked
    done = invoke(*arguments, "--replays", 1)
    assert done.exit_code == 0 and "1 response with A, B0\n" in done.stderr


def test_prompts_may_be_named_as_in_a_saved_rollout(tmp_path: Path, prompts: Path) -> None:
    found = {one.name: one.ids for one in read_tokens(prompts)}
    assert found == {"s0": (1, 2, 3), "sum": (4, 5), "c": (7,)}
    both = tmp_path / "both"
    both.write_text('{"ids": [1], "prompt_ids": [1]}')
    with pytest.raises(LayerBisectError, match="line 1 has ids and prompt_ids, which mean the sam"):
        read_tokens(both)


def go_on(said: str) -> list[str]:
    """The command that a message ends with, as words."""
    found = re.search(r": go on with `layerbisect scores (.*)`$", said)
    assert found, said
    return shlex.split(found[1])


def test_a_failed_collection_ends_with_the_command_that_goes_on(
    served: SimulatedWorker, prompts: Path, out: Path
) -> None:
    served.spoil["score"] = lambda _: Raw("out of memory", 500)
    with simulated_worker() as other:
        arguments = ("--prompts", prompts, "--out", out, "--worker", other.url)
        error = refused("collect", served.url, *arguments)
        assert "HTTP 500: 'out of memory'; see its log; " in error and f"{out} keeps A: go" in error
        served.spoil.clear()
        done = invoke(*go_on(error))
    assert done.exit_code == 0, done.output
    assert "6 responses with A, B0, B1, B2\n" in done.stderr
    assert ScoreRecord.open(out).info.columns["B2"].worker == other.url


def test_before_there_is_an_a_there_is_nothing_to_go_on_with(prompts: Path, out: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    error = refused("collect", url, "--prompts", prompts, "--out", out)
    assert error.endswith("start it, or correct its URL")


def test_an_interrupted_collection_says_how_to_go_on(
    served: SimulatedWorker, prompts: Path, out: Path
) -> None:
    def interrupt(_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return Raw("[]", seconds=20)

    served.spoil["score"] = interrupt
    # what was started in the background ignores the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = invoke("collect", served.url, "--prompts", prompts, "--out", out)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 130
    kept, last = [line for line in done.stderr.splitlines() if line]
    assert kept.startswith(f"{out} keeps A and every whole replay") and last == "interrupted"
    served.spoil.clear()
    assert invoke(*go_on(kept)).exit_code == 0
    assert ScoreRecord.open(out).columns == ("A", "B0", "B1")


def test_the_progress_says_what_is_waited_for(
    served: SimulatedWorker, prompts: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[tuple[str, int]] = []
    start = ConsoleProgress.start

    def noted(self: ConsoleProgress, description: str, total: int) -> None:
        stages.append((description, total))
        start(self, description, total)

    monkeypatch.setattr(ConsoleProgress, "start", noted)
    assert invoke("collect", served.url, "--prompts", prompts, "--out", out).exit_code == 0
    assert stages == [("generating 6 responses", 1), ("replay 1 of 2", 1), ("replay 2 of 2", 1)]


def test_a_replay_advances_by_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = ConsoleProgress(Console())
    told: list[object] = []
    monkeypatch.setattr(progress, "start", lambda *stage: told.append(stage))
    monkeypatch.setattr(progress, "advance", told.append)
    tell = of_replays(progress, 2)
    for done in range(7):
        tell(done, 6)
    assert told == [("replay 1 of 2", 3), 0, 1, 2, ("replay 2 of 2", 3), 0, 1, 2, 3]


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy before an update and after it."""
    folder = tmp_path_factory.mktemp("policies")
    shape: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 128}
    return (
        make_tiny(folder / "t0", "qwen3", seed=0, **shape),
        make_tiny(folder / "t1", "qwen3", seed=1, **shape),
    )


@pytest.fixture
def old(served: SimulatedWorker, prompts: Path, updated: tuple[Path, Path], out: Path) -> Path:
    done = invoke("collect", served.url, "--prompts", prompts, "--out", out)
    assert done.exit_code == 0, done.output
    done = invoke("trainer", out, "--model", updated[0])
    assert done.exit_code == 0, done.output
    served.asked.clear()
    return out


def carry(served: SimulatedWorker, old: Path, model: Path, out: Path, *more: object) -> Result:
    return invoke("carry", old, served.url, "--model", model, "--out", out, *more)


def test_a_version_that_the_worker_does_not_have_yet_is_no_error(
    served: SimulatedWorker, old: Path, updated: tuple[Path, Path], tmp_path: Path
) -> None:
    new = tmp_path / "carried"
    done = carry(served, old, updated[1], new, "--weight-version", "8")
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("divergent: weights on the rollout side: ")
    assert f"note: {served.url} calls its weights '1' and not '8'" in done.stderr
    columns = ScoreRecord.open(new).info.columns
    assert [columns[c].weight_version for c in ("B0", "C0")] == ["1", "8"]


def test_a_carried_record_holds_the_tokens_and_no_a_of_the_old_weights(
    served: SimulatedWorker, old: Path, updated: tuple[Path, Path], tmp_path: Path
) -> None:
    new = tmp_path / "carried"
    done = carry(served, old, updated[1], new)
    assert done.exit_code == 1 and "note: " not in done.stderr
    before, carried = ScoreRecord.open(old), ScoreRecord.open(new)
    assert carried.columns == ("B0", "B1", "C0", "C0.logit", "C0.entropy", "C1")
    for one, other in zip(before, carried, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.name == other.name
    # another batch would round otherwise, and move what has not moved
    assert carried.info.columns["B0"].batches == before.info.columns["B0"].batches


def test_installed_weights_get_the_name(
    served: SimulatedWorker, old: Path, updated: tuple[Path, Path], tmp_path: Path
) -> None:
    def install(_: Any) -> Any:
        served.version = "8"
        return {"success": True}

    served.spoil[INSTALL] = install
    new = tmp_path / "carried"
    model = Path(os.path.relpath(updated[1]))
    done = carry(served, old, model, new, "--install", "--weight-version", "8")
    assert "note: " not in done.stderr and new.exists()
    # the server runs in another directory
    (body,) = served.bodies(INSTALL)
    assert body["weight_version"] == "8" and Path(body["model_path"]).is_absolute()
    assert Path(body["model_path"]).resolve() == updated[1].resolve()
    assert ScoreRecord.open(new).info.columns["B0"].weight_version == "8"


def truncated(model: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in os.listdir(model):
        data = (model / name).read_bytes()
        (folder / name).write_bytes(data[:-100] if name.endswith(".safetensors") else data)
    return folder


CARRIED: dict[str, tuple[Callable[[Path, Path, Path], dict[str, object]], str]] = {
    "no model": (lambda old, model, tmp: {"--model": tmp / "none"}, "no config.json in"),
    "truncated": (
        lambda old, model, tmp: {"--model": truncated(model, tmp / "cut")},
        "is not a whole safetensors file",
    ),
    "tolerance": (lambda *_: {"--tolerance": "nan"}, "nan is no finite number above 0"),
    "out": (lambda old, model, tmp: {"--out": old}, "exists, and what was scored before is never"),
    "timeout": (lambda *_: {"--timeout": "0"}, "0 is no finite number above 0"),
}


@pytest.mark.parametrize("kind", CARRIED)
def test_bad_arguments_of_carry_reach_no_worker_and_leave_nothing(
    served: SimulatedWorker, old: Path, updated: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    change, said = CARRIED[kind]
    new = tmp_path / "carried"
    options = {"--model": updated[1], "--out": new, **change(old, updated[1], tmp_path)}
    words = [word for pair in options.items() for word in pair]
    assert said in refused("carry", old, served.url, *words, "--install")
    assert not served.asked and not new.exists()


def test_carry_needs_both_sides_of_the_old_record(
    served: SimulatedWorker, prompts: Path, updated: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert invoke("collect", served.url, "--prompts", prompts, "--out", old).exit_code == 0
    served.asked.clear()
    error = refused("carry", old, served.url, "--model", updated[1], "--out", new)
    assert error.startswith(f"{old} has no column C0; give a record that was scored on both sides")
    assert not served.asked and not new.exists()


def test_carry_leaves_nothing_where_the_worker_is_down(
    old: Path, updated: tuple[Path, Path], tmp_path: Path
) -> None:
    new, url = tmp_path / "carried", f"http://127.0.0.1:{free_port()}"
    assert "is down" in refused("carry", old, url, "--model", updated[1], "--out", new)
    assert not new.exists()


def test_repeats_in_another_dtype_are_refused_in_one_sentence(
    old: Path, updated: tuple[Path, Path]
) -> None:
    options = ("--model", updated[0], "--repeats", 4, "--dtype", "float32")
    error = refused("trainer", old, *options)
    assert error.startswith("C0 was scored in bfloat16 and the trainer computes in float32 now")
    done = invoke("trainer", old, *options[:4])
    assert done.exit_code == 0 and "C.grad, C2, C3" in done.stderr


def test_the_pages_trainer_function_scores_as_the_trainer_command_does(
    old: Path, updated: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (code,) = [block for block in blocks if "import score\n" in block]
    monkeypatch.chdir(tmp_path)
    whole = ScoreRecord.open(old)
    there = [column for column in whole.columns if column.startswith("C")]
    whole.without(*there).save("run.safetensors")
    exec(code.replace('"policy"', repr(str(updated[0]))), {})
    for one, other in zip(whole, ScoreRecord.open("run.safetensors"), strict=True):
        assert abs(one.scores["C0"] - other.scores["C0"]).max() < 1e-6
        assert abs(one.scores["C.grad"] - other.scores["C.grad"]).max() < 1e-6


def test_the_pages_rollout_lines_are_read(tmp_path: Path, served: SimulatedWorker) -> None:
    blocks = [b for b in re.findall(r"```\n(.*?)```", PAGE.read_text(), re.S) if "prompt_ids" in b]
    saved = tmp_path / "rollout.jsonl"
    for number, block in enumerate(blocks):
        for line in block.splitlines():
            json.loads(line)
        saved.write_text(block)
        done = invoke("collect", served.url, "--saved", saved, "--out", tmp_path / f"{number}")
        assert done.exit_code == 0, done.output
    assert blocks
