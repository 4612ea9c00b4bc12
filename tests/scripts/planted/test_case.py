"""What the locator of the benchmark is given, and what it makes of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from layerbisect.models import make_tiny
from scripts.accuracy import Benchmark, read_results, wanted
from scripts.accuracy_locator import locate
from scripts.planted import plan
from scripts.planted.case import Case, Plant, make
from scripts.planted.catalogue import CONTROLS, EVERYTHING, MODEL_FAULTS, NOT_PLANTED
from scripts.planted.fault import Control, ModelFault, held_out
from scripts.planted.figures import Result
from scripts.planted.judged import right
from scripts.planted.page import write_page
from scripts.planted.scene import Scene
from tests.conftest import SMALL


@pytest.fixture(scope="module")
def scene(shared: Path) -> Scene:
    model = make_tiny(shared / "model", **SMALL)
    return Scene(model, "float32", shared / "scene", sequences=3, response=40)


def fault(name: str) -> ModelFault:
    (found,) = [f for f in MODEL_FAULTS if f.name == name]
    return found


def test_faults_have_names_of_their_own_and_cite_public_reports() -> None:
    names = Counter(f.name for f in EVERYTHING)
    assert [name for name, count in names.items() if count > 1] == []
    cited = {r for f in EVERYTHING for r in f.reports}
    assert all("/" in report and "#" in report for report in cited), cited
    assert len(cited | set(NOT_PLANTED)) >= 120


def test_a_quarter_of_the_faults_is_kept_aside() -> None:
    aside = [held_out(f.name) for f in EVERYTHING if not isinstance(f, Control)]
    assert 0.15 < sum(aside) / len(aside) < 0.35


def test_every_part_is_whole_faults(scene: Scene) -> None:
    tuning, aside = (
        {c.plants[0].what.name for c in wanted(scene, ("single",), part)}
        for part in ("tuning", "held out")
    )
    assert tuning and aside and not tuning & aside


def test_a_folder_says_nothing_of_what_is_planted(scene: Scene, tmp_path: Path) -> None:
    case = Case("single", (Plant(fault("attention-rows-zeroed"), "trainer", 1),))
    made = make(scene, case, tmp_path / "0")
    assert {p.name for p in made.folder.iterdir()} == {
        "model", "record.safetensors", "rollout", "run-2", "trainer"
    }  # fmt: skip
    telling = [b"attention-rows-zeroed", b"zeroed", b"planted"]
    for path in made.folder.rglob("*"):
        if path.is_file():
            held = path.read_bytes()
            assert not [word for word in telling if word in held], path
    answer = locate(made.folder)
    assert all(right(made.truths, answer).values()), answer
    assert made.effect > made.floor > 0 and made.output > 1


def test_two_faults_on_two_sides_are_both_named(scene: Scene, tmp_path: Path) -> None:
    case = Case(
        "double",
        (
            Plant(fault("attention-rows-zeroed"), "trainer", 1),
            Plant(fault("o-proj-heads-swapped"), "rollout", 2),
        ),
    )
    made = make(scene, case, tmp_path / "0")
    assert len(made.truths) == 2
    assert right(made.truths, locate(made.folder))["all"]


def test_a_fault_of_decoding_alone_shows_the_decode_capture(scene: Scene, tmp_path: Path) -> None:
    decoding = next(f for f in MODEL_FAULTS if f.passes == "decode" and not held_out(f.name))
    made = make(scene, Case("single", (Plant(decoding, "rollout", 1),)), tmp_path / "0")
    assert (made.folder / "rollout").resolve().name == "run-0"
    assert (made.folder / "trainer").resolve() == scene.clean["trainer"].directory


def test_pairs_are_of_each_kind(scene: Scene) -> None:
    pairs = list(plan.pairs(scene))
    assert len({case.name for case in pairs}) == plan.PAIRS
    kinds = Counter(
        "sides"
        if case.plants[0].side != case.plants[1].side
        else "operators"
        if case.plants[0].layer == case.plants[1].layer
        else "layers"
        for case in pairs
    )
    assert min(kinds.values()) >= plan.PAIRS // 3 - 1 and len(kinds) == 3


def test_a_run_is_judged_by_another_process_kept_and_written_up(
    scene: Scene, tmp_path: Path
) -> None:
    benchmark = Benchmark(tmp_path, 1)
    clean = Case("control", (Plant(CONTROLS[0], "trainer"),))
    wrong = Case("single", (Plant(fault("attention-rows-zeroed"), "trainer", 1),))
    asked = [benchmark.judge(scene, "tiny", case) for case in (clean, wrong)]
    for one in asked:
        assert one is not None
        one.result()
    assert benchmark.judge(scene, "tiny", wrong) is None
    benchmark.close()
    first, second = map(Result, sorted(read_results(tmp_path), key=lambda row: row["kind"]))
    assert not first.accused and not first.truths
    assert second.right["all"] and second.class_ == "strong"
    assert not list((tmp_path / "cases").iterdir())
    page = write_page(read_results(tmp_path))
    assert "100.0 % (1 of 1)" in page and "Clean controls accused: 0 of 1." in page
