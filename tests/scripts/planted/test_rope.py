"""Faults of rotation and positions: where each begins, and which rows and channels it reaches."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from layerbisect.captures.errors import LayerBisectError
from scripts.planted import rope
from tests.scripts.planted.checking import PROMPT, Checked, Layout, Seen, changed_rows, check_truth

FAULTS = {fault.name: fault for fault in rope.FAULTS}
Find = Callable[[str], dict[Layout, Seen]]


@pytest.fixture(scope="module")
def find(moe: Checked, shared: Path) -> Find:
    """Plant a fault into layer 1 and check its truth, once."""
    return lru_cache(None)(lambda name: check_truth(moe, FAULTS[name], 1, shared / name))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_begins_where_it_says(name: str, find: Find) -> None:
    find(name)


@pytest.mark.parametrize("name", ["rope-scaling-ignored", "qk-norm-after-rope"])
def test_it_is_the_same_in_the_trainer(name: str, moe_trainer: Checked, tmp_path: Path) -> None:
    check_truth(moe_trainer, FAULTS[name], 2, tmp_path, ["single"])


@pytest.mark.parametrize("name", ["yarn-bounds-rounded", "compressed-key-positions"])
def test_it_is_the_same_without_experts(name: str, llama: Checked, tmp_path: Path) -> None:
    check_truth(llama, FAULTS[name], 3, tmp_path, ["single"])


def test_a_model_without_norms_cannot_norm_too_late(llama: Checked) -> None:
    with (
        pytest.raises(LayerBisectError, match="q/k norms"),
        FAULTS["qk-norm-after-rope"].form(llama.model, 1),
    ):
        pass


def test_yarn_bounds_move_a_few_pairs_of_channels(find: Find) -> None:
    seen = find("yarn-bounds-rounded")["single"]
    half = seen.clean.shape[2] // 2
    wrong = (seen.taken != seen.clean).any((0, 1))
    # pairs that are slowed down by other amounts: between rounded bounds of 5 and 12
    expected = np.zeros(2 * half, bool)
    expected[6:12] = expected[half + 6 : half + 12] = True
    assert (wrong == expected).all()


def test_a_lost_factor_makes_all_of_q_and_k_smaller(moe: Checked, find: Find) -> None:
    seen = find("rope-attention-factor-of-one")["single"]
    for taken, clean in (
        (seen.taken, seen.clean),
        [one.read("layers.1.attn.k") for one in (seen.capture, moe.clean("single"))],
    ):
        assert np.allclose(taken * 1.27726, clean, rtol=1e-4, atol=1e-5)


def test_only_keys_behind_the_compression_are_wrong(moe: Checked, find: Find) -> None:
    seen = find("compressed-key-positions")["single"]
    assert (seen.changed == (seen.positions >= rope.UNCOMPRESSED)).all()
    assert not changed_rows(moe.clean("single"), seen.capture, "layers.1.attn.q").any()


def test_decode_alone_counts_the_padding(find: Find) -> None:
    seen = find("decode-counts-the-padding")["batched decode"]
    assert (seen.changed == (seen.positions >= PROMPT)).all()


def test_a_norm_after_the_rotation_keeps_the_first_token(find: Find) -> None:
    seen = find("qk-norm-after-rope")["single"]
    first = seen.positions == 0
    assert np.allclose(seen.taken[first], seen.clean[first], rtol=1e-5, atol=1e-6)


def test_positions_that_begin_elsewhere_change_only_what_attention_is_given(
    moe: Checked, tmp_path: Path
) -> None:
    (control,) = rope.CONTROLS
    assert control.form is not None
    right = moe.clean("single")
    taken = moe.run(tmp_path / "run", "single", control.form(moe.model, 1))

    def off(point: str) -> float:
        return float(
            np.abs(taken.read(point) - right.read(point)).max() / np.abs(right.read(point)).max()
        )

    assert off("layers.0.attn.q") > 0.1
    assert 0 < off("layers.0.attn.context") < 2e-6
    assert off("logits") < 2e-6
