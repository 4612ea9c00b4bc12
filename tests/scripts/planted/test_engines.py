"""Cases on real engines: what is said of each, and that the engines have what is said."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layerbisect.bisect.locate import bisect
from layerbisect.planted_sglang import TRUTH
from scripts.planted import engine_plan, engines
from scripts.planted.engine_case import EngineCase, Part, hand_over, read_index, write_index
from scripts.planted.engine_plan import COMPONENTS, Planted, served_faults, trained_faults
from scripts.planted.engine_runs import LAYOUTS, RESPONSE, SEQUENCES, TINY, serve
from scripts.planted.engine_sizes import first_changed
from scripts.planted.fault import Truth, held_out
from tests.sglang_server import sglang_installed

PLANTED = [one for _, _, one, _ in served_faults()] + [one for _, _, one in trained_faults()]


def test_every_fault_is_planted_on_either_engine_or_both_and_in_all_depths() -> None:
    assert {one.fault.name for one in PLANTED} == set(TRUTH) == set(COMPONENTS)
    assert {one.fault.layer for one in PLANTED} == {0, TINY["layers"] // 2, TINY["layers"] - 1}
    assert len(list(served_faults())) >= 25 and len(list(trained_faults())) >= 15
    assert {layout for _, layout, _ in trained_faults()} == set(LAYOUTS)


def test_a_fault_has_the_truth_of_its_place() -> None:
    swapped = Planted("experts-swapped:5=4")
    assert swapped.truth("trainer") == Truth(5, "experts", "trainer", r"expert 4, 5\b")
    assert swapped.point == "layers.5.mlp.out"
    head = Planted("head-scaled:0=1.003")
    assert (head.truth("rollout"), head.point) == (Truth(None, "head", "rollout"), "logits")
    decoded = Planted("rope-shifted:5:decode").truth("decode")
    assert (decoded.layer, decoded.operator) == (5, "rope") and "decode rows" in decoded.where
    assert Planted("softmax-scale:3=1.18").reports == ("NVIDIA/Megatron-LM#1429",)
    assert Planted("softmax-scale:3=1.03").reports == ()


def case(folder: Path, **changed: Any) -> EngineCase:
    fields: dict[str, Any] = dict(
        name="sglang tp1: norm-weight:3",
        component="input_norm",
        reports=(),
        rollout=Part(folder / "server-1" / "capture", "rollout", "run-03-r*"),
        trainer=Part(folder / "trainer-one" / "run-05", "trainer"),
        record=folder / "records" / "one" / "run-05.safetensors",
        model=folder / "model",
        truth=Truth(3, "norm", "rollout"),
        engines=("sglang tp1", "megatron one"),
        held_out=held_out("norm-weight"),
        effect=0.03,
        floor=0.02,
        output=12.5,
    )
    return EngineCase(**fields | changed)


def test_the_index_is_read_as_it_was_written_and_tells_a_locator_nothing(tmp_path: Path) -> None:
    both = (Truth(3, "norm", "rollout"), Truth(None, "head", "trainer", "a|b"))
    cases = [
        case(tmp_path),
        case(tmp_path, truth=None, record=None, name="clean", output=0.0),
        case(tmp_path, truth=both, reports=("a/b#1", "c/d#2"), held_out=True),
    ]
    write_index(tmp_path, cases)
    assert list(read_index(tmp_path)) == cases
    assert [len(one.truths) for one in cases] == [1, 0, 2]
    given = json.loads((tmp_path / "cases.json").read_text())
    assert {key for one in given.values() for key in one} == {
        "rollout",
        "trainer",
        "record",
        "model",
    }
    words = {"norm", "clean", "head", str(tmp_path), *TRUTH, *TRUTH.values()}
    assert not [word for word in words if word in json.dumps(given)]


def test_a_locator_is_handed_links_with_plain_names(tmp_path: Path) -> None:
    folder = tmp_path / "case"
    hand_over(case(tmp_path), folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {"rollout", "trainer", "model", "record.safetensors", "sides.json"}
    assert (folder / "rollout").readlink() == (tmp_path / "server-1" / "capture").resolve()
    sides = json.loads((folder / "sides.json").read_text())
    assert sides["rollout"] == {"label": "rollout", "requests": "run-03-r*"}


needs_engines = pytest.mark.skipif(
    not sglang_installed() or importlib.util.find_spec("megatron") is None,
    reason="SGLang and megatron-core are not both installed",
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two faults of one server and one of one rank."""
    served = {1: ("softmax-scale:3=1.18", "o-proj-permuted:5:decode")}
    trained = {"one": ("norm-weight:0",)}
    for module in (engines, engine_plan):
        monkeypatch.setattr(module, "SERVED", served)
        monkeypatch.setattr(module, "LAYOUTS", {"one": LAYOUTS["one"]})
    monkeypatch.setattr(engine_plan, "TRAINED", trained)


@pytest.mark.server
@pytest.mark.slow
@needs_engines
@pytest.mark.usefixtures("few")
def test_the_engines_have_what_was_planted_and_are_not_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {one.name: one for one in recorded(tmp_path)}
    assert list(engines.untrue(tmp_path)) == []
    attention = cases["sglang tp1: softmax-scale:3=1.18"]
    verdict = bisect(
        attention.rollout.open(),
        attention.trainer.open(),
        model=attention.model,
        record=attention.record,
    )
    assert [(c.layer, c.operator, c.side) for c in verdict.culprits] == [
        (3, "attention", "rollout")
    ]
    assert attention.effect > 2 * attention.floor > 0.01 and attention.output > 10
    # the clean run shares its prompts with the others, and has no fault
    clean = engines.record_all(tmp_path).served[1].runs[0]
    assert clean.replayed == clean.unplanted
    assert [len(scores) for scores in clean.generated] == [RESPONSE] * SEQUENCES
    decode, prefill = (
        cases["sglang tp1 decode against prefill: o-proj-permuted:5:decode"],
        cases["clean: sglang tp1 decode against sglang tp1 prefill"],
    )
    assert decode.record is None and decode.truths[0].side == "decode"
    assert first_changed(prefill.trainer.open(), prefill.trainer.open()) is None
    assert not math.isnan(decode.output) and decode.output > 100

    def started(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("recorded again")

    monkeypatch.setattr("tests.sglang_server.sglang_server", started)
    monkeypatch.setattr("scripts.planted.engine_runs.run_job", started)
    assert {one.name: one for one in recorded(tmp_path)} == cases
    with pytest.raises(AssertionError, match="recorded again"):
        serve(tmp_path / "model", tmp_path / "server-1", 1, ("norm-weight:0",), [])


def recorded(folder: Path) -> Iterator[EngineCase]:
    """The cases of one server; those between two layouts are left out."""
    held = engines.record_all(folder)
    yield from engines.fault_cases(held)
    yield from engines.pass_controls(held)
