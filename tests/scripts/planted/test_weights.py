"""Each planted fault of weights and of sums over ranks begins where it says."""

from pathlib import Path

import numpy as np
import pytest
import torch

from layerbisect.captures.errors import LayerBisectError
from scripts.planted import weight_tools, weights
from scripts.planted.fault import Control, ModelFault
from tests.scripts.planted.checking import Checked, Seen, check_truth, wrong_points
from tests.scripts.planted.tied import tied_llama

FAULTS = {fault.name: fault for fault in weights.FAULTS}
COMPUTING = {
    "tensor-parallel-sums-in-bfloat16",
    "expert-parallel-sums-in-bfloat16",
    "final-norm-stale",
    "expert-added-twice",
}
"""Faults of which no parameter shows anything."""


def _names(engine: Checked, seen: Seen) -> set[str]:
    """Tensors of which a capture's fingerprint is another than the clean one's."""
    right = engine.clean("single").info.fingerprints
    return {n for n, digest in right.items() if seen.capture.info.fingerprints[n] != digest}


@pytest.mark.parametrize("fault", weights.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_begins_where_it_says(fault: ModelFault, moe: Checked, tmp_path: Path) -> None:
    seen = check_truth(moe, fault, 1, tmp_path, ["single"])["single"]
    assert (fault.name in COMPUTING) == (not _names(moe, seen))


@pytest.mark.parametrize("name", ["lora-gate-up-interleaved", "expert-parallel-sums-in-bfloat16"])
def test_it_is_the_same_in_decoding(name: str, moe: Checked, tmp_path: Path) -> None:
    check_truth(moe, FAULTS[name], 1, tmp_path, ["batched decode"])


@pytest.mark.parametrize(
    "name", ["lora-not-delivered", "fp8-scales-transposed", "expert-added-twice"]
)
def test_it_is_the_same_in_the_trainer(name: str, moe_trainer: Checked, tmp_path: Path) -> None:
    check_truth(moe_trainer, FAULTS[name], 2, tmp_path, ["single"])


@pytest.mark.parametrize(
    "name",
    ["lora-gate-up-interleaved", "fp8-scales-transposed", "tensor-parallel-sums-in-bfloat16"],
)
def test_it_is_the_same_without_experts(name: str, llama: Checked, tmp_path: Path) -> None:
    check_truth(llama, FAULTS[name], 3, tmp_path, ["single"])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("qkv-interleaved", {"q_proj", "k_proj", "v_proj"}),
        ("o-proj-heads-swapped", {"o_proj"}),
        ("k-norm-uninitialised", {"k_norm"}),
        ("mlp-norm-of-a-neighbour", {"post_attention_layernorm"}),
    ],
)
def test_which_weights_are_wrong(name: str, parts: set[str], moe: Checked, tmp_path: Path) -> None:
    seen = check_truth(moe, FAULTS[name], 2, tmp_path, ["single"])["single"]
    assert {n.rsplit(".", 2)[1] for n in _names(moe, seen)} == parts
    assert all(n.startswith("model.layers.2.") for n in _names(moe, seen))


def test_all_weights_are_stale(moe: Checked, tmp_path: Path) -> None:
    seen = check_truth(moe, FAULTS["weights-one-step-stale"], 0, tmp_path, ["single"])["single"]
    assert _names(moe, seen) == set(seen.capture.info.fingerprints)
    assert 0.0005 < seen.size < 0.005


def test_a_shared_head_is_as_stale_as_the_embedding() -> None:
    tied = tied_llama()
    with FAULTS["weights-stale"].form(tied, 0):
        assert torch.equal(tied.lm_head.weight, tied.model.embed_tokens.weight)
        assert not torch.equal(tied.lm_head.weight, tied.model.norm.weight)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_what_lora_trained_is_of_low_rank(moe: Checked) -> None:
    q = moe.model.model.layers[1].self_attn.q_proj
    right = q.weight.detach().clone()
    with FAULTS["lora-not-used"].form(moe.model, 0):
        missing = right - q.weight.detach()
    values = torch.linalg.svdvals(missing)
    assert int((values > 1e-4 * values[0]).sum()) == 2
    share = missing.norm() / right.norm()
    assert torch.isclose(share, torch.tensor(0.05), rtol=1e-3)


def test_q_k_and_v_hold_the_same_rows_in_another_order(moe: Checked) -> None:
    attention = moe.model.model.layers[0].self_attn

    def rows() -> torch.Tensor:
        weights = [getattr(attention, f"{part}_proj").weight.detach() for part in "qkv"]
        return torch.cat(weights)

    right = rows()
    with FAULTS["qkv-interleaved"].form(moe.model, 0):
        wrong = rows()
    assert not torch.equal(right, wrong)
    assert torch.equal(right.sum(1).sort().values, wrong.sum(1).sort().values)
    # of 4 heads and 2 KV heads of 32 channels: the first rank's q stays, its k comes next
    assert torch.equal(wrong[:64], right[:64])
    assert torch.equal(wrong[128:160], right[64:96])


def test_block_scales_make_the_most_of_eight_bits() -> None:
    weight = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    scales = weight_tools.block_scales(weight)
    assert scales.shape == (3, 2)
    back = weight_tools.quantised(weight, scales) * weight_tools.spread(scales, weight)
    # three bits after the point, of normal numbers
    large = weight.abs() > weight.abs().max() / 1000
    assert float(((back - weight) / weight)[large].abs().max()) <= 2**-4


def test_only_tokens_of_that_expert_are_added_twice(moe: Checked, tmp_path: Path) -> None:
    seen = check_truth(moe, FAULTS["expert-added-twice"], 2, tmp_path, ["single"])["single"]
    ids = moe.clean("single").read("layers.2.mlp.expert_ids")
    assert np.array_equal(seen.changed, (ids == 0).any(1))
    assert seen.changed.any()


@pytest.mark.parametrize("engine", ["moe", "moe_trainer"])
@pytest.mark.parametrize("control", weights.CONTROLS, ids=lambda control: control.name)
def test_controls_are_roundings_alone(
    control: Control, engine: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    checked: Checked = request.getfixturevalue(engine)
    assert control.form is not None
    taken = checked.run(tmp_path / "c", "single", control.form(checked.model, 0))
    right = checked.clean("single")
    wrong = next(wrong_points(right, taken), None)
    if control.name == "expert-parallel-sums":
        # two experts a token add up to the same bits in any order
        assert not wrong
    else:
        assert wrong == f"layers.0.{'mlp.out' if 'expert' in control.name else 'attn.out'}"
    assert np.abs(taken.scores.logprob - right.scores.logprob).max() < 1e-4


def test_what_a_model_cannot_have(llama: Checked) -> None:
    with pytest.raises(LayerBisectError, match="needs a model with q/k norms"):
        FAULTS["k-norm-uninitialised"].form(llama.model, 0).__enter__()
    for name in ("expert-added-twice", "expert-parallel-sums-in-bfloat16"):
        with pytest.raises(LayerBisectError, match="experts"):
            FAULTS[name].form(llama.model, 0).__enter__()
