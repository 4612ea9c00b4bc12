"""Operator bundles: written and read back whole, and refused in one sentence where they are not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from layerbisect.bisect.bundles import layer_bundles, open_side
from layerbisect.captures.store import Capture
from layerbisect.kernels.replay.bundle import (
    HEADER_KEY,
    Bundle,
    BundleError,
    Call,
    load_bundle,
    save_bundle,
)
from layerbisect.kernels.replay.judge import Judge

if TYPE_CHECKING:
    from tests.bisect.conftest import Clean


@pytest.fixture(scope="module")
def bundles(clean: Clean) -> dict[str, Bundle]:
    """Every stretch of layer 2 of the rollout's capture, by point."""
    model, side = open_side(Capture.open(clean.rollout), clean.model)
    made, refused = layer_bundles(model, side, 2)
    assert not refused
    return {bundle.point.removeprefix("layers.2."): bundle for bundle in made}


def test_every_stretch_is_read_back_as_it_was_written(
    bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    for name, bundle in bundles.items():
        path = tmp_path / f"{name}.safetensors"
        save_bundle(bundle, path)
        again = load_bundle(path)
        assert again.calls == bundle.calls
        for group in ("inputs", "weights", "captured"):
            ours, theirs = getattr(bundle, group), getattr(again, group)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[n], theirs[n]) for n in ours)
            assert all(ours[n].dtype == theirs[n].dtype for n in ours)
        one, other = (Judge(b).judge(b.captured) for b in (bundle, again))
        assert torch.equal(one.row_ratio, other.row_ratio)
        assert again.engine["engine"] == "transformers"
    assert not list(tmp_path.glob("*.partial"))


def test_units_run_alone_give_their_rows(bundles: dict[str, Bundle]) -> None:
    for bundle in bundles.values():
        units = [2, 0]
        starts = torch.tensor([0, *bundle.lengths]).cumsum(0)
        rows = torch.cat([torch.arange(int(starts[u]), int(starts[u + 1])) for u in units])
        alone, whole = Judge(bundle.only(units)), Judge(bundle)
        assert torch.allclose(alone.exact[alone.result], whole.exact[whole.result][rows])
        assert alone.bundle.rows == len(rows)


def test_only_the_weights_of_experts_in_use_are_taken(clean: Clean) -> None:
    model, side = open_side(Capture.open(clean.rollout), clean.model)
    made, _ = layer_bundles(model, side, 1, rows=1)
    (experts,) = [b for b in made if b.operator == "experts"]
    assert experts.rows == 1
    assert experts.weights["gate_up"].shape[0] == len(experts.expert_numbers) == 2
    assert set(experts.inputs["mlp.expert_ids"].flatten().tolist()) == {0, 1}
    assert experts.rows_left_out > 0


def test_a_file_that_is_no_bundle(tmp_path: Path, bundles: dict[str, Bundle]) -> None:
    text = tmp_path / "a.safetensors"
    text.write_bytes(b"nothing of the kind")
    with pytest.raises(BundleError, match="is no operator bundle"):
        load_bundle(text)
    other = tmp_path / "b.safetensors"
    save_file({"x": torch.zeros(2)}, other)
    with pytest.raises(BundleError, match="without the header 'layerbisect.bundle'"):
        load_bundle(other)
    whole = tmp_path / "c.safetensors"
    save_bundle(bundles["attn.norm"], whole)
    whole.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(BundleError, match="is no operator bundle"):
        load_bundle(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: facts | {"schema": 7}, "schema is not 1"),
        (lambda facts: facts | {"dtype": "int8"}, "is in int8, and only bfloat16"),
        (lambda facts: facts | {"surprise": 1}, "surprise"),
        (lambda facts: facts | {"calls": []}, "calls no operator"),
        (lambda facts: {k: v for k, v in facts.items() if k != "point"}, "point"),
    ],
)
def test_a_header_that_is_damaged(
    change: object, message: str, tmp_path: Path, bundles: dict[str, Bundle]
) -> None:
    path = tmp_path / "bundle.safetensors"
    save_bundle(bundles["attn.norm"], path)
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()[HEADER_KEY])
        tensors = {n: file.get_tensor(n) for n in list(file.keys())}
    assert callable(change)
    save_file(tensors, path, {HEADER_KEY: json.dumps(change(facts))})
    with pytest.raises(BundleError, match=message):
        load_bundle(path)


def test_a_missing_weight(bundles: dict[str, Bundle]) -> None:
    with pytest.raises(BundleError, match="lacks 'self_attn.o_proj.weight', which linear reads"):
        replace(bundles["attn.out"], weights={}).check()


def test_a_weight_of_another_shape(bundles: dict[str, Bundle]) -> None:
    bundle = bundles["attn.out"]
    weights = {n: w[:, :-1] for n, w in bundle.weights.items()}
    with pytest.raises(BundleError, match=r"does not fit together: weight must have shape \[out"):
        Judge(replace(bundle, weights=weights)).judge(bundle.captured)


def test_an_attribute_that_the_operator_has_not(bundles: dict[str, Bundle]) -> None:
    bundle = bundles["attn.context"]
    (call,) = bundle.calls
    wrong = replace(call, attributes={**call.attributes, "logit_softcap": 30.0})
    with pytest.raises(BundleError, match="sets 'logit_softcap' to 30.0, and attention has only"):
        replace(bundle, calls=(wrong,)).check()


def test_rows_that_do_not_fit(bundles: dict[str, Bundle]) -> None:
    bundle = bundles["mid"]
    inputs = {n: t[:-1] if n == "input" else t for n, t in bundle.inputs.items()}
    with pytest.raises(BundleError, match="input has 143 rows and the bundle of .* has 144"):
        replace(bundle, inputs=inputs).check()


def test_an_operator_that_nobody_knows(bundles: dict[str, Bundle]) -> None:
    calls = (Call("convolution", {}, ("mid",)),)
    with pytest.raises(BundleError, match="calls 'convolution', and the operators are rms_norm"):
        replace(bundles["mid"], calls=calls).check()
