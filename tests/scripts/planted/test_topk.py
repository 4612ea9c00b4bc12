"""Faults in the choice of experts begin where they say."""

from pathlib import Path

import numpy as np
import pytest

from layerbisect.captures.errors import LayerBisectError
from scripts.planted.fault import ModelFault
from scripts.planted.topk import BUFFER, FAULTS, ROWS, replayed_in_reverse
from tests.scripts.planted.checking import Checked, check_truth

OF_ROLLOUT = [fault for fault in FAULTS if "rollout" in fault.sides]
OF_TRAINER = [fault for fault in FAULTS if fault.sides == ("trainer",)]
LAYER = 1


def named(name: str) -> ModelFault:
    """One of the faults."""
    (fault,) = (one for one in FAULTS if one.name == name)
    return fault


@pytest.mark.parametrize("fault", OF_ROLLOUT, ids=lambda fault: fault.name)
def test_it_begins_where_it_says(fault: ModelFault, moe: Checked, tmp_path: Path) -> None:
    decoded = fault.name == "group-limited-top-k"
    check_truth(moe, fault, LAYER, tmp_path, None if decoded else ("single",))


@pytest.mark.parametrize("fault", OF_TRAINER, ids=lambda fault: fault.name)
def test_a_trainer_has_it(fault: ModelFault, moe_trainer: Checked, tmp_path: Path) -> None:
    check_truth(moe_trainer, fault, LAYER, tmp_path, ("single",))


@pytest.mark.parametrize(
    ("name", "rows"), [("router-rows-dropped", ROWS), ("top-k-buffer-wraps", BUFFER)]
)
def test_only_later_rows_have_it(name: str, rows: int, moe: Checked, tmp_path: Path) -> None:
    seen = check_truth(moe, named(name), LAYER, tmp_path)["single"]
    assert not seen.changed[seen.positions < rows].any()


def test_the_first_layer_replays_the_last(moe_trainer: Checked, tmp_path: Path) -> None:
    fault = named("replayed-from-layer-before")
    seen = check_truth(moe_trainer, fault, 0, tmp_path, ("single",))["single"]
    last = moe_trainer.clean("single").read("layers.3.mlp.expert_ids")
    assert np.array_equal(seen.taken, last)


def test_reversed_layers_are_those_of_a_right_model(moe_trainer: Checked, tmp_path: Path) -> None:
    right = moe_trainer.clean("single")
    planted = replayed_in_reverse(moe_trainer.model, 0)
    taken = moe_trainer.run(tmp_path / "planted", "single", planted)
    for layer in range(4):
        ids = taken.read(f"layers.{layer}.mlp.expert_ids")
        assert np.array_equal(ids, right.read(f"layers.{3 - layer}.mlp.expert_ids"))


def test_what_is_replayed_needs_a_trainer(moe: Checked, tmp_path: Path) -> None:
    planted = replayed_in_reverse(moe.model, 0)
    with pytest.raises(LayerBisectError, match="no KV cache"):
        moe.run(tmp_path / "planted", "batched decode", planted)


def test_a_dense_model_has_none(llama: Checked) -> None:
    for fault in FAULTS:
        with pytest.raises(LayerBisectError), fault.form(llama.model, LAYER):
            pass
