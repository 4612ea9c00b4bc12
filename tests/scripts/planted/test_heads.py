"""Each planted fault of the head and of precision begins where it says."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.planted import heads
from scripts.planted.fault import ModelFault
from scripts.planted.weight_tools import BLOCK
from tests.scripts.planted.checking import Checked, check_truth, wrong_points
from tests.scripts.planted.tied import tied_llama

FAULTS = {fault.name: fault for fault in heads.FAULTS}
CONTROLS = {control.name: control for control in heads.CONTROLS}


@pytest.mark.parametrize("fault", heads.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_begins_where_it_says(fault: ModelFault, moe: Checked, tmp_path: Path) -> None:
    check_truth(moe, fault, 1, tmp_path, ["single"])


@pytest.mark.parametrize("name", ["head-of-an-old-copy", "fp8-scales-rounded-up"])
def test_it_is_the_same_in_decoding(name: str, moe: Checked, tmp_path: Path) -> None:
    check_truth(moe, FAULTS[name], 1, tmp_path, ["batched decode"])


@pytest.mark.parametrize("fault", heads.FAULTS, ids=lambda fault: fault.name)
def test_it_is_the_same_without_experts(fault: ModelFault, llama: Checked, tmp_path: Path) -> None:
    check_truth(llama, fault, 3, tmp_path, ["single"])


def test_a_shared_table_stays_right_where_it_embeds() -> None:
    tied = tied_llama()
    right = tied.model.embed_tokens.weight
    for name in ("tied-head-scaled", "head-as-initialised"):
        with FAULTS[name].form(tied, 0):
            assert tied.model.embed_tokens.weight is right
            assert not torch.equal(tied.lm_head.weight, right)
        assert tied.lm_head.weight is right
    with FAULTS["tied-head-scaled"].form(tied, 0):
        ratio = tied.lm_head.weight / right
    assert torch.allclose(ratio, torch.tensor(math.sqrt(tied.config.hidden_size)))


def test_logits_are_of_bfloat16(moe: Checked, tmp_path: Path) -> None:
    seen = check_truth(moe, FAULTS["head-in-bfloat16"], 0, tmp_path, ["single"])["single"]
    logits = torch.from_numpy(seen.taken)
    assert torch.equal(logits, logits.bfloat16().float())


def test_an_old_copy_shows_in_no_fingerprint(moe: Checked, tmp_path: Path) -> None:
    seen = check_truth(moe, FAULTS["head-of-an-old-copy"], 0, tmp_path, ["single"])["single"]
    assert seen.capture.info.fingerprints == moe.clean("single").info.fingerprints


def test_each_block_gains_up_to_two(moe: Checked) -> None:
    q = moe.model.model.layers[1].self_attn.q_proj
    right = q.weight.detach().clone()
    with FAULTS["fp8-scales-rounded-up"].form(moe.model, 0):
        wrong = q.weight.detach().clone()
    blocks = [w.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK)) for w in (right, wrong)]
    gains = (blocks[0] * blocks[1]).sum((1, 3)) / blocks[0].square().sum((1, 3))
    assert float(gains.min()) > 0.98 and float(gains.max()) < 2.02
    assert float(gains.max()) > 1.5


def test_a_head_in_float32_leaves_all_before_it(small_moe_dir: Path, tmp_path: Path) -> None:
    engine = Checked.load(small_moe_dir, tmp_path, dtype="bfloat16")
    form = CONTROLS["head-in-float32"].form
    assert form is not None
    right = engine.clean("single")
    taken = engine.run(tmp_path / "c", "single", form(engine.model, 0))
    assert list(wrong_points(right, taken)) == ["logits"]
    gap = np.abs(taken.scores.logprob - right.scores.logprob)
    assert 0 < gap.max() < 0.1
