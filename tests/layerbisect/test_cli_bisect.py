"""`layerbisect bisect`: its options, and what it refuses."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from layerbisect.cli import main

GENERATOR = 48271


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def tokens(length: int, seed: int) -> list[int]:
    ids = [seed]
    while len(ids) < length:
        ids.append(ids[-1] * GENERATOR % 2147483647)
    return [i % 512 for i in ids]


@pytest.fixture(scope="module")
def pair(small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two captures of the same tokens, ``rollout`` (decoding) and ``trainer``."""
    folder = tmp_path_factory.mktemp("pair")
    lines = [
        {"ids": tokens(60, seed), "name": f"{kind}-{seed}", "prompt_length": 40}
        for kind in ("a", "b")
        for seed in (3, 4)
    ]
    path = folder / "tokens.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    command = ("capture", "--model", small_moe_dir, "--tokens", path, "--points", "all", "--out")
    for name, options in {
        "rollout": ("--decode-from-prompt", "--attention", "eager"),
        "trainer": (),
    }.items():
        done = run(*command, folder / name, *options)
        assert done.exit_code == 0, done.output
    return folder


def test_a_clean_pair_agrees(pair: Path, small_moe_dir: Path) -> None:
    done = run("bisect", pair / "rollout", pair / "trainer", "--model", small_moe_dir)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("agree: the gap of ")
    assert done.stderr == ""
    assert not any(line.endswith(" ") for line in done.stdout.split("\n"))


def test_options_reach_the_locator(pair: Path, small_moe_dir: Path) -> None:
    done = run(
        "bisect", pair / "rollout", pair / "rollout", "--model", small_moe_dir, "--json",
        "--rollout-requests", "a-*", "--trainer-requests", "b-*", "--labels", "first,again",
        "--probe", "search",
    )  # fmt: skip
    verdict = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert verdict["labels"] == ["first", "again"]
    assert verdict["probe"]["mode"] in ("search", "scan")
    # the same engine on the same tokens repeats to the bit
    assert verdict["gap"]["max"] == 0 and verdict["gap"]["rows"] == 2 * 59
    assert verdict["coverage"]["rows"] == {"joined": 120, "left_out": 0}


def test_forced_routes_split_the_gap(pair: Path, small_moe_dir: Path, tmp_path: Path) -> None:
    made = []
    for name, options in (("routes", ()), ("weights", ("--route-weights",))):
        made.append(tmp_path / name)
        done = run(
            "capture", "--model", small_moe_dir, "--tokens", pair / "tokens.jsonl",
            "--points", "all", "--out", made[-1], "--routes", pair / "rollout", *options,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
    command = ("bisect", pair / "rollout", pair / "trainer", "--model", small_moe_dir)
    forced = ("--forced", made[1], "--forced", made[0])
    page = run(*command, *forced)
    assert page.exit_code == 0, page.output
    assert "\nrouting: " in page.stdout and "\ngap split by routes\n" in page.stdout
    verdict = json.loads(run(*command, *forced, "--json").stdout)
    split = verdict["routing"]["split"]
    assert split["own"] == pytest.approx(verdict["gap"]["mae"])
    assert split["parts"].keys() == {"routes", "weights", "rest"}
    assert [one["layer"] for one in verdict["routing"]["layers"]] == [0, 1, 2, 3]
    refused = run(*command, "--forced", pair / "trainer")
    assert refused.exit_code == 2
    assert "was captured with the model's own routes" in refused.stderr


@pytest.mark.parametrize(
    "options, said",
    [
        (["--labels", "one"], "--labels is 'one': give two different names"),
        (["--labels", "same,same"], "--labels is 'same,same': give two different names"),
        (["--labels", "a,"], "--labels is 'a,': give two different names"),
        (["--rollout-requests", "nix-*"], "a sequence that matches 'nix-*'"),
        (
            ["--rollout-requests", "a-3", "--trainer-requests", "a-4"],
            "different tokens at position 0: rollout has 3 (sequence 'a-3'), trainer has 4",
        ),
    ],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_what_cannot_be_compared_is_one_sentence(
    pair: Path, small_moe_dir: Path, options: list[str], said: str, as_json: bool
) -> None:
    extra = [*options, "--json"] if as_json else options
    done = run("bisect", pair / "rollout", pair / "trainer", "--model", small_moe_dir, *extra)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr
    if as_json:
        verdict = json.loads(done.stdout)
        assert verdict["status"] == "inconclusive"
        assert f"error: {verdict['reasons'][0]}\n" == done.stderr
    else:
        assert done.stdout == ""


def test_one_label_twice_is_told_how_to_name_them_apart(pair: Path, small_moe_dir: Path) -> None:
    done = run("bisect", pair / "rollout", pair / "rollout", "--model", small_moe_dir)
    assert done.exit_code == 2
    assert "both captures are labelled 'rollout'; name them apart with --labels" in done.stderr


def test_a_model_that_is_not_there_is_refused(pair: Path, tmp_path: Path) -> None:
    done = run("bisect", pair / "rollout", pair / "trainer", "--model", tmp_path)
    assert done.exit_code == 2
    assert f"no config.json in {tmp_path}" in done.stderr
