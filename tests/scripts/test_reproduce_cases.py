"""The published experiments on a real server: every verdict names what was planted."""

from pathlib import Path

import pytest

from scripts.reproduce_cases import main
from tests.sglang_server import sglang_installed


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed")
def test_every_verdict_names_what_was_planted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--work", str(tmp_path / "cases"), "--tokens", "64"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    # three runs of each case, two carried responses and two temperatures
    assert printed.count("-> right") == 13
    assert "WRONG" not in printed


def test_a_directory_that_is_there_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--work", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: {tmp_path} exists; name a new directory by --work\n"
    assert not printed.out
