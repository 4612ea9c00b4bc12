"""Faults in routers and routing weights begin where they say, and controls only round."""

from pathlib import Path

import numpy as np
import pytest

from scripts.planted.fault import Control, ModelFault
from scripts.planted.router import CONTROLS, FAULTS
from tests.scripts.planted.checking import Checked, changed_rows, check_truth, wrong_points

REORDERED = "replayed-ids-new-weights"
LAYER = 1


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if f.name != REORDERED], ids=lambda fault: fault.name
)
def test_it_begins_where_it_says(fault: ModelFault, moe: Checked, tmp_path: Path) -> None:
    # decode takes most of the time, and of these only one sees how many tokens a call has
    decoded = fault.name == "weights-normalised-over-tokens"
    check_truth(moe, fault, LAYER, tmp_path, None if decoded else ("single",))


@pytest.mark.parametrize("name", ["router-in-bfloat16", "raw-logits-as-weights"])
def test_the_trainer_can_have_it(name: str, moe_trainer: Checked, tmp_path: Path) -> None:
    (fault,) = (one for one in FAULTS if one.name == name)
    check_truth(moe_trainer, fault, LAYER, tmp_path, ("single",))


def test_replayed_ids_are_the_same_experts(moe_trainer: Checked, tmp_path: Path) -> None:
    (fault,) = (one for one in FAULTS if one.name == REORDERED)
    right = moe_trainer.clean("single")
    taken = moe_trainer.run(tmp_path / "planted", "single", fault.form(moe_trainer.model, LAYER))
    ids, weights = f"layers.{LAYER}.mlp.expert_ids", fault.point_in(LAYER)
    assert next(wrong_points(right, taken)) == ids
    assert np.array_equal(np.sort(right.read(ids)), np.sort(taken.read(ids)))
    apart = np.abs(right.read(weights) - taken.read(weights)[:, ::-1])
    assert (apart > 0).any(1).mean() >= fault.changes
    assert apart.max() < 2**-7


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_control_only_rounds(control: Control, moe: Checked, tmp_path: Path) -> None:
    assert control.form is not None
    right = moe.clean("single")
    # it is in every layer: only the first one has the same input
    taken = moe.run(tmp_path / "planted", "single", control.form(moe.model, 0))
    logits, out = "layers.0.mlp.router_logits", "layers.0.mlp.out"
    assert not changed_rows(right, taken, logits).any()
    # in a float32 model those that are for bfloat16 alone round more
    bound = 1e-5 if "bfloat16" not in control.name else 2e-2
    apart = np.abs(right.read(out) - taken.read(out)).max()
    assert apart <= bound * np.abs(right.read(out)).max()


def test_near_ties_flip_in_bfloat16(small_moe_dir: Path, tmp_path: Path) -> None:
    (control,) = (one for one in CONTROLS if one.name == "experts-chosen-before-rounding")
    assert control.form is not None
    engine = Checked.load(small_moe_dir, tmp_path, dtype="bfloat16")
    weight = engine.model.model.layers[0].mlp.gate.weight.data
    # one expert is nearly the twin of each other one
    weight[1::2] = weight[::2]
    weight[1::2, ::16] *= 1 + 2**-6
    right = engine.clean("single")
    taken = engine.run(tmp_path / "planted", "single", control.form(engine.model, 0))
    ids, logits = (f"layers.0.mlp.{name}" for name in ("expert_ids", "router_logits"))
    assert not changed_rows(right, taken, logits).any()
    other = (right.read(ids) != taken.read(ids)).any(1)
    assert 0 < other.sum() < len(other)
    # two logits that were rounded by half a step each
    ordered = np.sort(right.read(logits).astype(np.float64))[:, ::-1][other]
    gaps = -np.diff(ordered[:, :3])
    assert (gaps.min(1) <= 2**-7 * np.abs(ordered[:, 0])).all()
