"""Faults and roundings that depend on how many tokens there are: where each begins, its size."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from scripts.planted import batching, batching_forms
from scripts.planted.fault import Control
from tests.scripts.planted.checking import PROMPT, SEQUENCES, Checked, Layout, Seen, check_truth

FAULTS = {fault.name: fault for fault in batching.FAULTS}
Find = Callable[[str], Seen]


def _check(name: str, engine: Checked, folder: Path, layer: int = 1) -> Seen:
    """The last layout in which it is planted; a trainer's fault is in no decode."""
    trains = FAULTS[name].sides == ("trainer",)
    seen = check_truth(engine, FAULTS[name], layer, folder, ["single"] if trains else None)
    return list(seen.values())[-1]


@pytest.fixture(scope="module")
def find(moe: Checked, shared: Path) -> Find:
    """Plant a fault into layer 1 and check its truth, once."""
    return lru_cache(None)(lambda name: _check(name, moe, shared / name))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_begins_where_it_says(name: str, find: Find) -> None:
    find(name)


@pytest.mark.parametrize(
    "name", ["expert-partials-in-8-bits", "hidden-dropout-left-on", "attention-dropout-left-on"]
)
def test_it_is_the_same_in_the_trainer(name: str, moe_trainer: Checked, tmp_path: Path) -> None:
    check_truth(moe_trainer, FAULTS[name], 2, tmp_path, ["single"])


@pytest.mark.parametrize("name", ["graph-keeps-positions", "hidden-dropout-left-on"])
def test_it_is_the_same_without_experts(name: str, llama: Checked, tmp_path: Path) -> None:
    _check(name, llama, tmp_path, 3)


def test_partial_sums_in_8_bits_are_a_few_hundredths_off(find: Find) -> None:
    seen = find("expert-partials-in-8-bits")
    off = np.linalg.norm(seen.taken - seen.clean, axis=1) / np.linalg.norm(seen.clean, axis=1)
    assert 0.01 < np.median(off) < 0.1


def test_every_fourth_step_keeps_its_positions(find: Find) -> None:
    seen = find("graph-keeps-positions")
    step = seen.positions % batching_forms.STEPS == batching_forms.STEPS - 1
    assert (seen.changed == (step & (seen.positions >= PROMPT))).all()


@pytest.mark.parametrize("name", ["hidden-dropout-left-on", "attention-dropout-left-on"])
def test_no_two_runs_drop_the_same(name: str, moe: Checked, find: Find, tmp_path: Path) -> None:
    one, other = find(name), _check(name, moe, tmp_path)
    assert (one.taken != other.taken).reshape(len(one.taken), -1).any(1).mean() > 0.9


def test_a_tenth_of_what_is_added_is_dropped(moe: Checked, find: Find) -> None:
    seen = find("hidden-dropout-left-on")
    added = [one.read("layers.0.attn.out") for one in (seen.capture, moe.clean("single"))]
    assert (added[0] == added[1]).all()
    stream = moe.clean("single").read("layers.0.input")
    dropped = seen.taken == stream
    assert abs(dropped.mean() - batching_forms.DROPOUT) < 0.01
    kept = stream + added[0] / np.float32(1 - batching_forms.DROPOUT)
    assert np.allclose(seen.taken[~dropped], kept[~dropped], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "control", [c for c in batching.CONTROLS if c.form], ids=lambda control: control.name
)
def test_controls_are_roundings_alone(control: Control, moe: Checked, tmp_path: Path) -> None:
    assert control.form is not None
    layout: Layout = "batched decode" if control.layout == "batched decode" else "single"
    taken = moe.run(tmp_path / "run", layout, control.form(moe.model, 1)).read("logits")
    right = moe.clean(layout).read("logits")
    assert 0 < np.abs(taken - right).max() < 2e-6 * np.abs(right).max()


def test_the_rounding_depends_on_the_batch(moe: Checked, tmp_path: Path) -> None:
    control = next(c for c in batching.CONTROLS if c.name == "projection-split-by-length")
    assert control.form is not None
    # all lanes' prompts together are few tokens, and each step is fewer
    assert SEQUENCES * PROMPT <= batching_forms.LONG
    taken = moe.run(tmp_path / "run", "batched decode", control.form(moe.model, 1))
    point = "layers.1.attn.out"
    assert (taken.read(point) == moe.clean("batched decode").read(point)).all()
