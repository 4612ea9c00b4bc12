"""Each planted fault of embedding, norms and residual stream begins where it says."""

from pathlib import Path

import numpy as np
import pytest
import torch

from layerbisect.captures.store import Capture
from scripts.planted import norms
from scripts.planted.fault import Control, ModelFault
from tests.scripts.planted.checking import Checked, check_truth, wrong_points

FAULTS = {fault.name: fault for fault in norms.FAULTS}
CONTROLS = {control.name: control for control in norms.CONTROLS}


@pytest.mark.parametrize("fault", norms.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_begins_where_it_says(fault: ModelFault, moe: Checked, tmp_path: Path) -> None:
    check_truth(moe, fault, 1, tmp_path, ["single"])


@pytest.mark.parametrize("name", ["residual-in-bfloat16", "embedding-rows-lost"])
def test_it_is_the_same_in_decoding(name: str, moe: Checked, tmp_path: Path) -> None:
    check_truth(moe, FAULTS[name], 1, tmp_path, ["batched decode"])


@pytest.mark.parametrize(
    "name", ["norm-weights-plus-one", "attention-not-added", "residual-in-bfloat16"]
)
def test_it_is_the_same_in_the_trainer(name: str, moe_trainer: Checked, tmp_path: Path) -> None:
    check_truth(moe_trainer, FAULTS[name], 2, tmp_path, ["single"])


@pytest.mark.parametrize("name", ["every-norm-eps", "mlp-norms-eps", "embedding-rows-lost"])
def test_it_is_the_same_without_experts(name: str, llama: Checked, tmp_path: Path) -> None:
    check_truth(llama, FAULTS[name], 3, tmp_path, ["single"])


def test_a_wrong_eps_makes_less_of_every_row(moe: Checked, tmp_path: Path) -> None:
    seen = check_truth(moe, FAULTS["every-norm-eps"], 0, tmp_path, ["single"])["single"]
    ratio = np.linalg.norm(seen.taken, axis=1) / np.linalg.norm(seen.clean, axis=1)
    assert ((0.97 < ratio) & (ratio < 0.995)).all()


def test_one_is_added_to_the_weight(moe: Checked, tmp_path: Path) -> None:
    fault = FAULTS["norm-weights-plus-one"]
    seen = check_truth(moe, fault, 0, tmp_path, ["single"])["single"]
    weight = moe.model.model.layers[0].input_layernorm.weight.detach().numpy()
    assert np.allclose(seen.taken / seen.clean, 1 + 1 / weight, rtol=1e-5)


def test_only_lost_rows_are_embedded_otherwise(moe: Checked, tmp_path: Path) -> None:
    seen = check_truth(moe, FAULTS["embedding-rows-lost"], 0, tmp_path, ["single"])["single"]
    first_lost = moe.model.config.vocab_size - norms.LOST_ROWS
    assert (seen.changed == (np.concatenate(moe.tokens) >= first_lost)).all()


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("embedding-scale-unrounded", 55.4256 / 55.5), ("embedding-scale-of-float32", 33.9411 / 34)],
)
def test_embeddings_are_scaled(name: str, ratio: float, moe: Checked, tmp_path: Path) -> None:
    seen = check_truth(moe, FAULTS[name], 0, tmp_path, ["single"])["single"]
    assert np.allclose(seen.taken, seen.clean * np.float32(ratio), rtol=1e-6)


@pytest.fixture(scope="module")
def rounding(small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    return Checked.load(small_moe_dir, tmp_path_factory.mktemp("bfloat16"), dtype="bfloat16")


def _planted(engine: Checked, name: str, folder: Path) -> tuple[Capture, Capture]:
    form = CONTROLS[name].form
    assert form is not None
    right = engine.clean("single")
    return right, engine.run(folder / name, "single", form(engine.model, 0))


def test_a_cast_after_the_weight_rounds_once(rounding: Checked, tmp_path: Path) -> None:
    right, taken = _planted(rounding, "norm-casts-last", tmp_path)
    assert next(wrong_points(right, taken)) == "layers.0.attn.norm"
    norm = rounding.model.model.layers[0].input_layernorm
    stream = torch.from_numpy(right.read("layers.0.input")).double()
    exact = stream * (stream.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    exact = exact * norm.weight.detach().double()
    errors = [
        float(((torch.from_numpy(one.read("layers.0.attn.norm")) - exact) / exact).abs().max())
        for one in (right, taken)
    ]
    # half a unit of bfloat16's last place, and for two roundings twice that
    assert errors[1] <= 2**-8 < errors[0] <= 2**-7


def test_norms_of_unrounded_sums_leave_the_stream_alone(rounding: Checked, tmp_path: Path) -> None:
    right, taken = _planted(rounding, "norms-of-unrounded-sums", tmp_path)
    assert next(wrong_points(right, taken)) == "layers.0.mlp.norm"


@pytest.mark.parametrize("control", norms.CONTROLS, ids=lambda control: control.name)
def test_controls_are_roundings_alone(control: Control, moe: Checked, tmp_path: Path) -> None:
    assert control.form is not None
    taken = moe.run(tmp_path / "c", "single", control.form(moe.model, 0))
    # in float32 they compute the same bits
    assert not list(wrong_points(moe.clean("single"), taken))
