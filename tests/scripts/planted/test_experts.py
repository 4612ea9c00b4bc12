"""Faults in experts begin where they say, and controls only round."""

from pathlib import Path

import numpy as np
import pytest

from layerbisect.captures.errors import LayerBisectError
from scripts.planted.experts import CONTROLS, FAULTS
from scripts.planted.fault import Control, ModelFault
from tests.scripts.planted.checking import Checked, check_truth, wrong_points

LAYER = 1
DENSE = [fault for fault in FAULTS if fault.dense is not None]
DECODED = ("tokens-permuted-twice", "dummy-token-of-an-idle-expert")
"""What depends on how many tokens a call has; decode takes most of the time."""
GROUPED = ("tokens-permuted-twice", "swiglu-gate-clamped", "shared-expert-partial")


def named(name: str) -> ModelFault:
    """One of the faults."""
    (fault,) = (one for one in FAULTS if one.name == name)
    return fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_begins_where_it_says(fault: ModelFault, moe: Checked, tmp_path: Path) -> None:
    check_truth(moe, fault, LAYER, tmp_path, None if fault.name in DECODED else ("single",))


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_experts_can_have_it(name: str, moe_trainer: Checked, tmp_path: Path) -> None:
    check_truth(moe_trainer, named(name), LAYER, tmp_path, ("single",))


@pytest.mark.parametrize("fault", DENSE, ids=lambda fault: fault.name)
def test_a_dense_layer_can_have_it(fault: ModelFault, llama: Checked, tmp_path: Path) -> None:
    check_truth(llama, fault, LAYER, tmp_path, ("single",))


def test_the_others_need_experts(llama: Checked) -> None:
    for fault in FAULTS:
        if fault.dense is None and fault.name != "experts-swapped":
            with pytest.raises(LayerBisectError), fault.form(llama.model, LAYER):
                pass


def test_the_first_token_keeps_its_weights(moe: Checked, tmp_path: Path) -> None:
    seen = check_truth(moe, named("weights-of-another-token"), LAYER, tmp_path, ("single",))
    found = seen["single"]
    assert not found.changed[found.positions == 0].any()
    assert found.changed[found.positions > 0].mean() > 0.9


def test_tokens_permuted_twice_sum_to_the_same(moe: Checked, tmp_path: Path) -> None:
    seen = check_truth(moe, named("tokens-permuted-twice"), LAYER, tmp_path, ("single",))
    found = seen["single"]
    length = len(moe.tokens[0])
    totals = [
        rows.reshape(-1, length, rows.shape[-1]).sum(1) for rows in (found.clean, found.taken)
    ]
    assert np.allclose(totals[0], totals[1], atol=1e-5)


def test_only_a_calls_first_token_is_a_dummy(moe: Checked, tmp_path: Path) -> None:
    fault = named("dummy-token-of-an-idle-expert")
    seen = check_truth(moe, fault, LAYER, tmp_path)["batched decode"]
    sequences = seen.capture.rows.sequence
    assert len(set(sequences[seen.changed & (seen.positions >= 8)].tolist())) == 1


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_control_only_rounds(
    control: Control, experts: str, small_moe_dir: Path, tmp_path: Path
) -> None:
    # it is in every layer: only the first one has the same input
    out = "layers.0.mlp.out"
    assert control.form is not None
    for dtype in control.dtypes:
        engine = Checked.load(small_moe_dir, tmp_path / dtype, experts=experts, dtype=dtype)
        right = engine.clean("single")
        planted = control.form(engine.model, 0)
        taken = engine.run(tmp_path / dtype / "planted", "single", planted)
        assert next(wrong_points(right, taken)) == out
        a, b = (one.read(out).astype(np.float64) for one in (right, taken))
        # some roundings of an expert's inner values, of its output and of its share
        bound = 4 * (2**-8 if dtype == "bfloat16" else 2**-20)
        assert np.abs(a - b).max() <= bound * np.abs(a).max()
