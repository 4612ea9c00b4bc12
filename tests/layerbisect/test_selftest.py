"""The self-test: what it plants and replaces, what the locator is given, and how it is judged."""

import dataclasses
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from layerbisect import planted_sglang
from layerbisect.bisect import locate
from layerbisect.bisect.progress import NoProgress, Progress
from layerbisect.bisect.verdict import Coverage, CoveredRows, Culprit, Points, Verdict
from layerbisect.captures.errors import LayerBisectError
from layerbisect.faults import FAULTS
from layerbisect.selftest import INSTEAD, WANTED, SelfTest, Setting, Tried, run_selftest
from layerbisect.selftest_engines import CLEAN, Bench, CannotPlant

NOTHING = Coverage(Points(0, ()), CoveredRows(0, 0))
AGREE = Verdict("agree", None, (), (), None, NOTHING, "", ("no reason",))
ACCUSED = dataclasses.replace(
    AGREE,
    status="divergent",
    culprits=(Culprit(1, "layers.1.mid", "residual", "trainer", 0.8, 9.0, 1.1, "all rows", ()),),
)


def watched() -> AbstractContextManager[Progress]:
    return nullcontext(NoProgress())


@pytest.fixture
def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call everything in agreement at once, where the test is about something else."""
    monkeypatch.setattr(locate, "bisect", lambda *arguments, **options: AGREE)


def names(done: SelfTest) -> list[str]:
    return [one.outcome.planted.fault for one in done.faults if one.outcome.planted]


def test_every_operator_is_among_the_ten() -> None:
    assert len(WANTED) == 10 and sorted({*WANTED, *INSTEAD}) == sorted(FAULTS)
    assert {FAULTS[name].operator for name in WANTED} == {f.operator for f in FAULTS.values()}


def test_planted_faults_are_found_and_the_locator_is_told_nothing(
    small_moe_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    bisect = locate.bisect

    def watching(rollout: Path, trainer: Path, **options: Any) -> Verdict:
        assert set(options) == {"model", "probe", "progress"} and options["model"] == small_moe_dir
        for folder in (rollout, trainer):
            seen.append(str(folder.relative_to(kept)))
            seen.extend(path.read_text() for path in folder.rglob("*.json"))
        return bisect(rollout, trainer, **options)

    monkeypatch.setattr(locate, "bisect", watching)
    kept, told, settings = tmp_path / "kept", list[Tried](), list[Setting]()
    done = run_selftest(
        watched,
        model=small_moe_dir,
        device="cpu",
        keep=kept,
        faults=3,
        begin=settings.append,
        tell=told.append,
    )
    assert done.passed and done.exit_code == 0 and not done.clean_accused
    assert (done.found, names(done), done.left_out) == (3, list(WANTED[:3]), ())
    planted = [one.outcome.planted for one in done.faults]
    assert [(p.layer, p.side) for p in planted if p] == [
        (0, "rollout"),
        (2, "trainer"),
        (3, "rollout"),
    ]
    assert tuple(told) == done.tried and settings == [done.setting]
    assert (done.setting.dtype, done.setting.device) == ("bfloat16", "cpu")
    assert seen and not any(name in text for name in FAULTS for text in seen)
    # what is kept can be judged again, and says what was planted beside the captures alone
    assert done.faults[1].captures == f"{kept / '00' / 'rollout'} {kept / '02' / 'trainer'}"
    assert json.loads((kept / "selftest.json").read_text()) == done.to_json()
    assert done.to_json()["tried"][0]["planted"] is None
    assert all(one["captures"] for one in done.to_json()["tried"])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_a_dense_model_cannot_have_is_replaced(
    family: str, unjudged: None, request: pytest.FixtureRequest
) -> None:
    done = run_selftest(watched, model=request.getfixturevalue(f"small_{family}_dir"), device="cpu")
    assert len(done.faults) == done.wanted == 10 == len(set(names(done)))
    assert [(one.fault, one.instead) for one in done.left_out] == [
        ("router-low-precision", "rope-base"),
        ("experts-swapped", "final-norm-weight"),
    ]
    assert all("needs a layer with experts" in one.why for one in done.left_out)
    # nothing is judged here: no fault counts as found
    assert (done.found, done.clean_accused, done.exit_code) == (0, False, 1)


def test_fewer_faults_are_said_to_be_fewer(
    small_llama_dir: Path, unjudged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Bench.plant

    def only_two(bench: Bench, name: str, *rest: Any) -> Any:
        if name not in ("rope-shifted", "rope-base"):
            raise CannotPlant(f"no {name}")
        return plant(bench, name, *rest)

    monkeypatch.setattr(Bench, "plant", only_two)
    done = run_selftest(watched, model=small_llama_dir, device="cpu")
    # the first takes the first that can be instead of it
    assert names(done) == ["rope-base", "rope-shifted"] and done.wanted == 10
    assert done.left_out[0].instead == "rope-base" and done.left_out[-1].instead is None
    assert len(done.left_out) == len(FAULTS) - 2


def test_where_nothing_can_be_planted_nothing_is_said_to_pass(
    small_llama_dir: Path, unjudged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(bench: Bench, name: str, *rest: Any) -> Any:
        raise CannotPlant(f"no {name}")

    monkeypatch.setattr(Bench, "plant", never)
    with pytest.raises(LayerBisectError, match="no fault can be planted here: no norm-weight"):
        run_selftest(watched, model=small_llama_dir, device="cpu", faults=1)


def test_a_clean_pair_that_is_accused_fails(
    small_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "bisect", lambda *arguments, **options: ACCUSED)
    done = run_selftest(watched, model=small_llama_dir, device="cpu", faults=1)
    assert done.clean_accused and done.exit_code == 1 and done.found == 0
    assert done.to_json()["clean_accused"] is True
    # nothing is named that is not there any more
    assert [one["captures"] for one in done.to_json()["tried"]] == [None, None]
    assert done.faults[0].outcome.mistakes()[0] == "the layer is 1, not 0"


def test_a_fault_that_changes_nothing_is_none(small_llama_dir: Path, tmp_path: Path) -> None:
    bench = Bench(small_llama_dir, tmp_path, "cpu", "float32", length=24)
    bench.open(NoProgress())
    assert bench.computed_in == "float32"
    bench.capture("trainer", 1, NoProgress())
    with pytest.raises(CannotPlant, match="changes no score"):
        bench.check_changed("trainer", 1)
    bench.plant("head-scaled", 0, "rollout", 2, NoProgress())
    bench.forget(2)
    assert not (tmp_path / "02").exists()
    # nothing of it is left
    bench.capture("rollout", 3, NoProgress())
    with pytest.raises(CannotPlant, match="changes no score"):
        bench.check_changed("rollout", 3)
    assert bench.source("rollout", CLEAN) == tmp_path / "00" / "rollout"


def test_the_planting_plugin_is_inert_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(planted_sglang.FILE, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sglang", None)
    planted_sglang.register()


def test_the_planting_plugin_is_no_entry_point_of_the_package() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert "planted" not in project.read_text()
