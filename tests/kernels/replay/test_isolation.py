"""Implementations that take their process down, and the journal that outlives it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from layerbisect.captures.errors import LayerBisectError
from layerbisect.kernels.replay.bundle import Bundle
from layerbisect.kernels.replay.replayer import replay
from layerbisect.kernels.replay.report import Replay
from tests.kernels.replay.test_replayer import FAKES, bundles_of

if TYPE_CHECKING:
    from tests.bisect.conftest import Clean

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def bundle(clean: Clean) -> Bundle:
    """The output projection of one layer of a clean capture."""
    return bundles_of(clean.rollout, clean.model)["attn.out"]


@pytest.fixture(autouse=True)
def fakes_in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let worker processes import the fakes."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(bundle: Bundle, *names: str, **more: Any) -> Replay:
    options: dict[str, Any] = {"known": FAKES, "repeats": 2, "timeout_s": 20} | more
    return replay(bundle, names=names or None, **options)


def test_the_others_still_report(bundle: Bundle, tmp_path: Path) -> None:
    journal = tmp_path / "new folder" / "journal.jsonl"
    names = ("right", "exits", "segfaults", "hangs", "scaled", "absent")
    began = time.monotonic()
    found = run(bundle, *names, timeout_s=4, journal=journal)
    assert time.monotonic() - began < 60
    results = {result.name: result for result in found.results}
    assert results["right"].state == results["scaled"].state == "ran"
    assert results["absent"].state == "unavailable"
    assert {results[name].state for name in ("exits", "segfaults", "hangs")} == {"crashed"}
    assert results["exits"].why == (
        "its process exited with code 0 before it answered (a last word)"
    )
    assert results["segfaults"].why == "its process was killed by SIGSEGV before it answered"
    assert results["hangs"].why == "no answer within 4 s"
    assert results["exits"].package == "fakes 1.0"
    assert found.status == "acquitted" and "right returns it bit for bit" in found.conclusion
    # in one process the same is said of those that live
    alike = replay(bundle, names=["right", "scaled"], isolate=False, known=FAKES, repeats=2)
    assert alike.engine == found.engine
    assert list(alike.results) == [results["right"], results["scaled"]]

    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    started = [line["started"]["name"] for line in lines if "started" in line]
    assert started == ["right", "scaled", "exits", "segfaults", "hangs"]
    # all of it is in the journal, for those who ask for less too: nothing is run again
    assert run(bundle, *names, journal=journal) == found
    assert run(bundle, "scaled", journal=journal).results == (results["scaled"],)
    assert [json.loads(line) for line in journal.read_text().splitlines()] == lines


def test_what_a_dead_run_had_started_is_skipped(bundle: Bundle, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    options: dict[str, Any] = {"isolate": False, "known": FAKES, "journal": journal, "repeats": 2}
    run(bundle, "right", **options)
    whole = journal.read_text().splitlines()
    started = next(line for line in whole if '"started"' in line)
    cut = [line for line in whole if '"result"' not in line and '"finished"' not in line]
    assert cut[-1] == started
    # the machine went down while the result was written
    result = next(line for line in whole if '"result"' in line)
    journal.write_text("\n".join(cut) + "\n" + result[:100])
    found = run(bundle, "right", "scaled", **options)
    right, scaled = found.results
    assert (right.state, right.why) == ("crashed", "an earlier run did not get past it")
    assert right.package == "fakes 1.0"
    assert scaled.state == "ran"
    for line in journal.read_text().splitlines():
        json.loads(line)


def test_a_journal_of_another_replay(bundle: Bundle, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    options: dict[str, Any] = {"isolate": False, "journal": journal}
    run(bundle, "right", **options)
    before = journal.read_text()
    other = replace(bundle, captured={n: -t for n, t in bundle.captured.items()})
    with pytest.raises(LayerBisectError, match="is the journal of another replay: its bundle is"):
        run(other, "right", **options)
    with pytest.raises(LayerBisectError, match="its repeats is 2, and this one's 3; give another"):
        run(bundle, "right", **{**options, "repeats": 3})
    assert journal.read_text() == before
    for text in ("no journal\n", '{"a": 1}\n', '["a"]\n', "a"):
        journal.write_text(text)
        with pytest.raises(LayerBisectError, match="journal"):
            run(bundle, "right", **options)
        assert journal.read_text() == text
    with pytest.raises(LayerBisectError, match="cannot be a journal: Is a directory"):
        run(bundle, "right", isolate=False, journal=tmp_path)


def test_what_a_worker_refuses_is_said_in_its_words(bundle: Bundle) -> None:
    with pytest.raises(LayerBisectError) as error:
        run(bundle, "tritn")
    assert str(error.value).startswith("no implementation of linear is called 'tritn': there are")


def test_a_list_of_implementations_that_takes_the_process_down(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "broken.py").write_text("raise KeyError('what')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    with pytest.raises(LayerBisectError, match="exited with code 3 before it started any"):
        run(bundle, known="deadly")
    with pytest.raises(RuntimeError, match="KeyError: 'what'"):
        run(bundle, known="broken")
