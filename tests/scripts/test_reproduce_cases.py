"""The published experiments on a real server: every verdict names what was planted."""

from pathlib import Path

import pytest

from scripts.reproduce_cases import main
from scripts.reproduce_report import Report
from tests.sglang_server import sglang_installed


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed")
@pytest.mark.parametrize(
    ("trainer", "right"),
    [
        # three runs of each case, two carried responses with the weights, two temperatures
        ("transformers", 9 + 4 + 2),
        # and what the capture has where the scoring function is at fault: two runs' scores
        ("megatron", 9 + 4 + 3),
    ],
)
def test_every_verdict_names_what_was_planted(
    trainer: str, right: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if trainer == "megatron":
        pytest.importorskip("megatron.core", reason="CI has megatron-core")
    code = main(["--work", str(tmp_path / "cases"), "--tokens", "64", "--trainer", trainer])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert printed.count("-> right") == right
    assert "WRONG" not in printed


def test_each_trainers_part_of_the_page_is_written_anew_and_the_other_kept(tmp_path: Path) -> None:
    page = tmp_path / "cases.md"
    megatron = {"layout": "pp2", "ranks": "PP 2 on 2 processes", "version": "0.16.1"}
    for said, told in (("one", None), ("two", megatron), ("three", None), ("four", megatron)):
        report = Report()
        report.say(f"{said} was seen")
        report.write_page(page, 64, told)
    text = page.read_text()
    assert text.count("# The published experiments, reproduced") == 1
    assert text.count("## The same with Megatron-core as the trainer") == 1
    assert text.index("three was seen") < text.index("## The same") < text.index("four was seen")
    assert "one was seen" not in text and "two was seen" not in text


def test_a_directory_that_is_there_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--work", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: {tmp_path} exists; name a new directory by --work\n"
    assert not printed.out
