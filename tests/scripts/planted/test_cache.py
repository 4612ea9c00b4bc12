"""Faults of the KV cache and of packing: where each begins, how far it reaches, and its size."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.planted import cache, cache_forms, packing_forms
from scripts.planted.fault import Control, ModelFault, Scored
from tests.scripts.planted.checking import PROMPT, Checked, Layout, Seen, check_truth

LATE = 45
"""Drafts are stale from here on in the sequences of these tests, which are shorter."""
FAULTS = {fault.name: fault for fault in cache.FAULTS if isinstance(fault, ModelFault)}
for _name, _form in (
    ("stale-drafts-read", cache_forms.drafts_read(LATE)),
    ("stale-drafts-fed", cache_forms.drafts_fed(LATE)),
):
    FAULTS[_name] = replace(FAULTS[_name], form=_form)
DECODE: Layout = "batched decode"
Find = Callable[[str], Seen]


def _check(name: str, engine: Checked, folder: Path, layer: int = 1) -> Seen:
    """The last layout in which it is planted; a trainer's fault is in no decode."""
    fault = FAULTS[name]
    trains = fault.sides == ("trainer",)
    seen = check_truth(engine, fault, layer, folder, ["single"] if trains else None)
    return list(seen.values())[-1]


@pytest.fixture(scope="module")
def find(moe: Checked, shared: Path) -> Find:
    """Plant a fault into layer 1 and check its truth, once."""
    return lru_cache(None)(lambda name: _check(name, moe, shared / name))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_begins_where_it_says(name: str, find: Find) -> None:
    find(name)


def test_it_is_the_same_in_the_trainer(moe_trainer: Checked, tmp_path: Path) -> None:
    check_truth(moe_trainer, FAULTS["chunk-tails-dropped"], 2, tmp_path, ["single"])


@pytest.mark.parametrize("name", ["stale-prefix-kv", "stale-drafts-fed"])
def test_it_is_the_same_without_experts(name: str, llama: Checked, tmp_path: Path) -> None:
    _check(name, llama, tmp_path, 3)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("stale-prefix-kv", cache_forms.CACHED),
        ("kv-scale-of-one-saturates", PROMPT),
        ("kv-fp8-in-whole-tiles", cache_forms.TILE),
        ("prefix-partials-in-bf16", cache_forms.WARM),
        ("stale-drafts-read", LATE),
        ("stale-drafts-fed", LATE),
    ],
)
def test_all_rows_from_a_position_on_are_wrong_and_none_before(
    name: str, first: int, find: Find
) -> None:
    seen = find(name)
    assert (seen.changed == (seen.positions >= first)).all()


def test_old_keys_are_as_far_off_as_their_weights(moe: Checked, find: Find, tmp_path: Path) -> None:
    assert 0.02 < find("stale-prefix-kv").size < 0.3
    # of weights that never changed, the keys are those that attention computes itself
    same = replace(FAULTS["stale-prefix-kv"], form=cache_forms.stale_prefix((0.0,)))
    taken = moe.run(tmp_path / "same", DECODE, same.form(moe.model, 1))
    for point in ("layers.1.attn.context", "logits"):
        right = moe.clean(DECODE).read(point)
        assert np.allclose(taken.read(point), right, atol=1e-5 * np.abs(right).max())


def test_a_chunk_without_its_tail_has_empty_rows(find: Find) -> None:
    seen = find("chunk-tails-dropped")
    empty = (seen.taken == 0).all((1, 2))
    # 48 tokens in 10 chunks of 5, of which 4 are computed
    assert (empty == (seen.positions % 5 == 4)).all()


def test_chunks_that_come_out_even_lose_nothing(moe: Checked) -> None:
    ids = torch.tensor([moe.tokens[0][: 4 * packing_forms.RANKS]])
    with torch.no_grad():
        right = moe.model(input_ids=ids).logits
        with packing_forms.tail_dropped(moe.model, 1):
            assert torch.equal(moe.model(input_ids=ids).logits, right)


def test_the_first_document_has_none_before_it(moe_trainer: Checked, tmp_path: Path) -> None:
    fault = FAULTS["documents-attend-across"]
    seen = check_truth(moe_trainer, fault, 2, tmp_path, ["single"])["single"]
    first = seen.capture.rows.sequence == 0
    assert not seen.changed[first].any()
    assert seen.changed[~first].all()


@pytest.mark.parametrize("control", cache.CONTROLS[:2], ids=lambda control: control.name)
def test_controls_are_roundings_alone(control: Control, moe: Checked, tmp_path: Path) -> None:
    assert control.form is not None
    taken = moe.run(tmp_path / "run", "single", control.form(moe.model, 1))
    for point in ("layers.1.attn.context", "logits"):
        right = moe.clean("single").read(point)
        off = np.abs(taken.read(point) - right).max() / np.abs(right).max()
        assert 0 < off < 2e-6


def test_one_response_is_scored_as_another() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = [torch.randn(5, 32, generator=draw) for _ in range(6)]
    tokens = [torch.randint(0, 32, (5,), generator=draw).numpy() for _ in range(6)]
    columns = ("A", "B0", "B1", "C0", "C1")
    scored = Scored(
        scores={name: [np.zeros(5) for _ in tokens] for name in columns},
        logits={"trainer": logits, "rollout": logits},
        prompts=[np.zeros(2, np.int64) for _ in tokens],
        tokens=tokens,
        definition={},
    )
    packing_forms.mispaired(scored)
    wrong = packing_forms.MISPAIRED
    other = logits[wrong + 1].double().log_softmax(-1).numpy()
    for name, values in scored.scores.items():
        for number, value in enumerate(values):
            if name in ("C0", "C1") and number == wrong:
                assert np.allclose(value, other[np.arange(5), tokens[wrong]])
            else:
                assert not value.any()
