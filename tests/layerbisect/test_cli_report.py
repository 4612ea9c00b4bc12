"""`layerbisect report`: what it takes, writes, prints and returns."""

import json
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from layerbisect.bisect.scores.judge import judge
from layerbisect.bisect.verdict import (
    Coverage,
    CoveredRows,
    Gap,
    Points,
    RoundingBudget,
    Verdict,
)
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.cli import main


def run(*arguments: str | Path, stdin: str | None = None) -> Result:
    """Run it as a shell does: the boundary exits by itself."""
    return CliRunner().invoke(main, ["report", *map(str, arguments)], input=stdin)


def scores(offset: float) -> str:
    """What `scores judge --json` prints of a record whose A is lower by ``offset`` nat."""
    random = np.random.default_rng(1)
    calls = []
    for number in range(6):
        b = -random.exponential(1.0, 40)
        columns = {"A": b - offset, "B0": b, "C0": b + random.normal(0, 0.001, 40)}
        calls.append(Call.of(f"call-{number}", [1, 2], range(40), columns))
    record = ScoreRecord(RecordInfo(columns={c: Scoring() for c in ("A", "B0", "C0")}), calls)
    return json.dumps(judge([record]).to_json())


@pytest.fixture
def agree(tmp_path: Path) -> Path:
    path = tmp_path / "agree.json"
    path.write_text(scores(0.0))
    return path


@pytest.fixture
def divergent(tmp_path: Path) -> Path:
    path = tmp_path / "divergent.json"
    path.write_text(scores(0.1))
    return path


def test_page_and_junit_are_written_and_the_exit_code_is_the_results(
    agree: Path, divergent: Path, tmp_path: Path
) -> None:
    page, junit = tmp_path / "report.html", tmp_path / "report.xml"
    assert run(agree, "-o", page).exit_code == 0
    done = run(agree, divergent, "-o", page, "--junit", junit, "--title", "a <case>")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr == f"wrote {page}\nwrote {junit}\n"
    assert "<title>divergent: a &lt;case&gt;</title>" in page.read_text()
    assert ElementTree.fromstring(junit.read_bytes()).get("failures") != "0"


def test_a_page_is_the_same_twice(divergent: Path, tmp_path: Path) -> None:
    for name in ("one.html", "two.html"):
        run(divergent, "-o", tmp_path / name, "--title", "same")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_without_files_it_prints_what_each_command_prints(agree: Path, divergent: Path) -> None:
    done = run(agree, divergent)
    assert done.exit_code == 1
    assert "== agree\nagree: " in done.stdout
    assert "== divergent\ndivergent: logprob on the rollout side" in done.stdout
    # a command is copied, and a headline looked for: neither is broken into lines
    whole = ("agree: ", "divergent: ", "next: ")
    lines = [line for line in done.stdout.splitlines() if not line.startswith(whole)]
    assert max(map(len, lines)) <= 100


def test_a_result_is_read_from_stdin(tmp_path: Path) -> None:
    done = run("-", "-o", tmp_path / "report.html", stdin=scores(0.1))
    assert done.exit_code == 1
    assert (tmp_path / "report.html").exists()


def test_json_lists_results_and_what_was_written(divergent: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    data = json.loads(run(divergent, "-o", page, "--json").stdout)
    assert data["written"] == [str(page)]
    (result,) = data["results"]
    assert (result["name"], result["status"]) == ("divergent", "divergent")
    assert "0.100 nat" in result["sentence"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[1]", "holds [1] and no result"),
        ('{"schema": 2}', "has schema 2 and this version reads 1"),
        ('{"schema": 1, "checks": []}', "holds checks, schema, which is no result"),
        ("{}", "is no result of a command; give what"),
        ('{"schema": 1, "checks": [], "replays": []}', "holds checks, replays, schema"),
        ('{"schema": 1, "culprits": [], "coverage": {}}', "is damaged, or of another version"),
    ],
)
def test_what_is_no_result_is_refused_and_nothing_is_written(
    text: str, said: str, tmp_path: Path
) -> None:
    path, page = tmp_path / "result.json", tmp_path / "report.html"
    path.write_text(text)
    done = run(path, "-o", page)
    assert done.exit_code == 2
    assert said in done.stderr
    assert not page.exists()


def test_a_capture_and_a_record_are_told_apart_from_results(tmp_path: Path) -> None:
    (tmp_path / "capture.json").write_text("{}")
    assert "compare two with `layerbisect bisect`" in run(tmp_path).stderr
    record = tmp_path / "run.safetensors"
    record.write_bytes(b"")
    assert "layerbisect scores judge" in run(record).stderr


def test_options_of_the_page_need_a_page(agree: Path) -> None:
    assert "give --out, too" in run(agree, "--title", "x").stderr
    assert "give --out, too" in run(agree, "--tokenizer", "x").stderr


def test_a_page_that_cannot_be_written_leaves_nothing(agree: Path, tmp_path: Path) -> None:
    done = run(agree, "-o", tmp_path / "nowhere" / "report.html")
    assert done.exit_code == 2
    assert f"there is no folder {tmp_path / 'nowhere'}; make it first" in done.stderr
    taken = tmp_path / "taken"
    taken.mkdir()
    assert run(agree, "-o", taken).exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agree.json", "taken"]


def test_bisections_of_the_same_tokens_explain_scores_without_a_culprit(tmp_path: Path) -> None:
    """Engines whose scores differ by noise alone: only captures can call that rounding."""
    scores = written(tmp_path, "scores", noisy_scores(0.03))
    gaps = {pair["name"]: pair["gap"] for pair in noisy_scores(0.03)["scores"]["pairs"]}
    first = written(tmp_path, "a-c", agreeing(gaps["A-C0"]))
    second = written(tmp_path, "a-b", agreeing(gaps["A-B0"]))
    assert run(scores).exit_code == 1
    # one explains its own pair, and not the others
    assert run(scores, first).exit_code == 1
    done = run(scores, first, second, "--json", "--junit", tmp_path / "case.xml")
    assert done.exit_code == 0
    said = json.loads(done.stdout)["results"][0]
    assert said["status"] == "agree"
    assert said["sentence"].startswith("each gap is rounding by ")
    assert ElementTree.parse(tmp_path / "case.xml").getroot().get("failures") == "0"
    assert run(scores, first, second).stdout.startswith("== scores\nagree: each gap is rounding")


@pytest.mark.parametrize("figure", ["mae", "p99", "max", "rows"])
def test_a_bisection_of_other_tokens_explains_nothing(tmp_path: Path, figure: str) -> None:
    scores = written(tmp_path, "scores", noisy_scores(0.03))
    files = []
    for pair in noisy_scores(0.03)["scores"]["pairs"]:
        other = pair["gap"] | {figure: pair["gap"][figure] * 2}
        files.append(written(tmp_path, pair["name"], agreeing(other)))
    assert run(scores, *files).exit_code == 1


def test_bisections_explain_no_shape_that_scores_convict(divergent: Path, tmp_path: Path) -> None:
    pairs = json.loads(divergent.read_text())["scores"]["pairs"]
    files = [written(tmp_path, pair["name"], agreeing(pair["gap"])) for pair in pairs]
    assert run(divergent, *files).exit_code == 1


def test_what_is_worst_leads_the_page_and_is_the_exit_code(
    agree: Path, divergent: Path, tmp_path: Path
) -> None:
    bisect = written(tmp_path, "bisect", agreeing())
    for files in ((bisect, divergent), (divergent, bisect), (agree, divergent, bisect)):
        page = tmp_path / "report.html"
        assert run(*files, "-o", page).exit_code == 1
        assert "<title>divergent: " in page.read_text()


def test_no_input_is_written_over_and_no_file_twice(agree: Path, tmp_path: Path) -> None:
    before = agree.read_bytes()
    for option in ("--out", "--junit"):
        done = run(agree, option, agree)
        assert done.exit_code == 2
        assert "is one of the results; write to another file" in done.stderr
    assert agree.read_bytes() == before
    done = run(agree, "--out", tmp_path / "x", "--junit", tmp_path / "x")
    assert done.exit_code == 2
    assert not (tmp_path / "x").exists()


def test_a_link_is_followed_and_what_is_no_file_is_left(agree: Path, tmp_path: Path) -> None:
    target, link, pipe = (tmp_path / name for name in ("target.html", "link.html", "pipe"))
    target.write_text("old")
    link.symlink_to(target)
    assert run(agree, "-o", link).exit_code == 0
    assert link.is_symlink() and target.read_text().startswith("<!doctype html>")
    os.mkfifo(pipe)
    assert "is no ordinary file" in run(agree, "-o", pipe).stderr
    assert pipe.is_fifo()


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    data = agreeing() | {"status": "inconclusive", "reasons": ["\x1b]0;x\x07 \ud800 \u202e"]}
    done = run(written(tmp_path, "odd", data))
    assert done.exit_code == 2
    assert "\\x1b]0;x\\x07 \\ud800 \\u202e" in done.stdout


def written(folder: Path, name: str, data: dict[str, Any]) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(data))
    return path


def noisy_scores(size: float) -> dict[str, Any]:
    """A verdict on scores that differ by noise of this standard deviation (nat)."""
    random = np.random.default_rng(2)
    calls = []
    for number in range(8):
        b = -random.exponential(2.0, 100) - 1
        noise = random.normal(0, size, (2, 100))
        calls.append(
            Call.of(
                f"call-{number}",
                [1, 2],
                range(100),
                {"A": b + noise[0], "B0": b, "C0": b + noise[1]},
            )
        )
    record = ScoreRecord(RecordInfo(columns={c: Scoring() for c in ("A", "B0", "C0")}), calls)
    return judge([record]).to_json()


def agreeing(gap: dict[str, Any] | None = None) -> dict[str, Any]:
    """A bisection that agrees, with this gap."""
    verdict = Verdict(
        status="agree",
        gap=Gap(0.024, 0.0, 0.06, 0.08, 0.1, 800),
        culprits=(),
        ruled_out=(),
        rounding_budget=RoundingBudget(0.03, {}, 0.03, 0.03, {}, 800),
        coverage=Coverage(Points(10, ()), CoveredRows(800, 0)),
        next="",
        reasons=("the gap of 0.024 nat is rounding",),
    )
    return verdict.to_json() | ({} if gap is None else {"gap": gap})
