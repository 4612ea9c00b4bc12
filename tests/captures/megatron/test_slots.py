"""Which part of which checkpoint tensor a rank's parameters are, against a written-out layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from layerbisect.captures.errors import LayerBisectError, ModelDirectoryError
from layerbisect.captures.fingerprint import fingerprint
from layerbisect.captures.megatron.place import Place
from layerbisect.captures.megatron.slots import slots
from layerbisect.captures.megatron.weights import fingerprints, load_checkpoint
from layerbisect.captures.weights.format import SnapshotInfo
from layerbisect.captures.weights.snapshot import write_rank
from layerbisect.captures.weights.store import WeightSnapshot
from tests.captures.megatron.standing import (
    GPTModel,
    Sizes,
    Tensors,
    by_engine,
    parameters,
    stacked,
    tensors_of,
)

SPECS = ("local", "TransformerEngine", "stacked")
ALONE = Place()


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Stand alone unless a test says otherwise, without asking Megatron."""
    with at(ALONE):
        yield


def at(place: Place) -> Any:
    """Stand at a place of a job."""
    return mock.patch.object(Place, "here", return_value=place)


def standing(held: Tensors, sizes: Sizes, place: Place = ALONE, spec: str = "local") -> GPTModel:
    made = parameters(held, sizes, place)
    if spec == "TransformerEngine":
        made = by_engine(made)
    elif spec == "stacked":
        made = stacked(made, sizes)
    return GPTModel(made, sizes.config)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Sizes, list[Place]]:
    """Sizes of a model, and the places of a job that can hold it."""
    tensor = draw(st.sampled_from([1, 2, 4, 8]))
    groups = draw(
        st.sampled_from([1, 2, 3, 4, 8]).filter(lambda g: not (tensor % g and g % tensor))
    )
    # heads are spread evenly, and where groups are fewer than ranks so are a group's rows
    queries = draw(st.integers(1, 4)) * (tensor // groups if tensor > groups else 1)
    head = draw(
        st.sampled_from([2, 4, 8]).filter(lambda d: not (queries + 2) * groups * d % tensor)
    )
    expert, expert_tensor = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    vocab = draw(st.integers(1, 20))
    sizes = Sizes(
        groups=groups,
        queries=queries,
        head=head,
        hidden=draw(st.integers(1, 5)),
        inner=8 * draw(st.integers(1, 2)),
        experts=expert * draw(st.integers(1, 3)),
        vocab=vocab,
        padded=tensor * (-(-vocab // tensor) + draw(st.integers(0, 4))),
    )
    places = [
        Place(tensor=(t, tensor), expert=(e, expert), expert_tensor=(x, expert_tensor))
        for t in range(tensor)
        for e in range(expert)
        for x in range(expert_tensor)
    ]
    return sizes, places


@settings(max_examples=40)
@given(job=jobs(), spec=st.sampled_from(SPECS))
def test_all_ranks_together_hold_the_checkpoint(
    job: tuple[Sizes, list[Place]], spec: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sizes, places = job
    held = sizes.checkpoint()
    directory = tmp_path_factory.mktemp("snapshot")
    info = SnapshotInfo("test", "1", "trainer", "float32", len(places), True)
    for rank, place in enumerate(places):
        with at(place):
            found, left_out = slots(standing(held, sizes, place, spec), vocab=sizes.vocab)
        assert left_out == {}
        write_rank(directory, info, rank, (slot.part() for slot in found))
    snapshot = WeightSnapshot.open(directory)
    assert snapshot.names() == tuple(sorted(held))
    for name, whole in held.items():
        read = snapshot.tensor(name)
        assert read.disagreements == () and torch.equal(read.values, whole), name


@settings(max_examples=40)
@given(job=jobs(), spec=st.sampled_from(SPECS), data=st.data())
def test_every_value_of_a_rank_is_loaded(
    job: tuple[Sizes, list[Place]],
    spec: str,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    sizes, places = job
    held = sizes.checkpoint()
    directory = tmp_path_factory.mktemp("checkpoint")
    save_file(held, directory / "model.safetensors")
    place = data.draw(st.sampled_from(places))
    model = standing(held, sizes, place, spec)
    expected = {name: value.clone() for name, value in tensors_of(model).items()}
    for value in tensors_of(model).values():
        value.fill_(torch.nan)
    with at(place):
        load_checkpoint(model, directory)
    for name, value in tensors_of(model).items():
        assert torch.equal(value, expected[name]), name


def test_rows_go_by_query_group() -> None:
    sizes = Sizes(groups=2, queries=2, head=1, hidden=1)
    stem = "model.layers.0.self_attn"
    values = {"q": [11.0, 12, 13, 14], "k": [21.0, 22], "v": [31.0, 32]}
    held = sizes.checkpoint()
    held |= {f"{stem}.{n}_proj.weight": torch.tensor(v)[:, None] for n, v in values.items()}

    def rows(rank: int, size: int) -> dict[str, tuple[list[float], tuple[int, ...]]]:
        model = standing(held, sizes, Place(tensor=(rank, size)))
        with at(Place(tensor=(rank, size))):
            found = [s for s in slots(model)[0] if s.name.startswith(stem)]
        return {
            s.name.removeprefix(f"{stem}.")[0]: (s.values().flatten().tolist(), s.extents[0])
            for s in found
            if s.name.endswith("_proj.weight") and "o_proj" not in s.name
        }

    packed = standing(held, sizes).get_parameter(
        "decoder.layers.0.self_attention.linear_qkv.weight"
    )
    assert packed.flatten().tolist() == [11, 12, 21, 31, 13, 14, 22, 32]
    assert rows(0, 1) == {n: (v, (0, len(v), len(v))) for n, v in values.items()}
    assert rows(1, 2) == {
        "q": ([13, 14], (2, 4, 4)),
        "k": ([22], (1, 2, 2)),
        "v": ([32], (1, 2, 2)),
    }
    # of more ranks than groups each holds a stretch of one
    assert rows(2, 4) == {"q": ([13, 14], (2, 4, 4))}
    assert rows(3, 4) == {"k": ([22], (1, 2, 2)), "v": ([32], (1, 2, 2))}


def test_a_stage_names_its_layers_by_the_whole_model() -> None:
    sizes = Sizes()
    made = parameters(sizes.checkpoint(), sizes, ALONE)
    layers = {n: v for n, v in made.items() if n.startswith("decoder.layers.")}
    chunks = [GPTModel(dict(layers), sizes.config, first=first) for first in (4, 12)]
    found, left_out = slots([torch.nn.Sequential(chunk) for chunk in chunks])
    numbers = {int(slot.name.split(".")[2]) for slot in found}
    assert numbers == {4, 5, 12, 13} and left_out == {}


def test_a_later_stage_of_a_tied_model_holds_the_embedding() -> None:
    sizes = Sizes(vocab=12)
    made = {"output_layer.weight": sizes.checkpoint()["model.embed_tokens.weight"]}
    (slot,) = slots(GPTModel(made, sizes.config, tied=True))[0]
    assert slot.name == "model.embed_tokens.weight"


def test_shared_experts_without_a_gate_are_named_in_the_plural() -> None:
    sizes = Sizes()
    made = parameters(sizes.checkpoint(), sizes, ALONE)
    del made["decoder.layers.1.mlp.shared_experts.gate_weight"]
    config = sizes.config
    config.moe_shared_expert_gate = False
    names = {slot.name for slot in slots(GPTModel(made, config))[0]}
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in names
    assert not any(".shared_expert." in name for name in names)


def test_an_unknown_parameter_is_reported_and_not_loaded(tmp_path: Path) -> None:
    sizes = Sizes()
    held = sizes.checkpoint()
    save_file(held, tmp_path / "model.safetensors")
    # a module's own name does not make it a layer's
    for unknown in ("decoder.layers.1.self_attention.linear_kv_down_proj.weight",
                    "mtp.layers.0.eh_proj.weight", "input_layernorm.weight"):  # fmt: skip
        made = parameters(held, sizes, ALONE) | {unknown: torch.zeros(2, 2)}
        model = GPTModel(made, sizes.config)
        found, left_out = slots(model, vocab=sizes.vocab)
        assert left_out == {unknown: "no checkpoint's name is known for it"}
        assert {slot.name for slot in found} == set(held)
        with pytest.raises(LayerBisectError, match=f"{unknown} cannot be loaded"):
            load_checkpoint(model, tmp_path)


@pytest.mark.parametrize(
    ("setting", "value", "name", "why"),
    [
        ("layernorm_zero_centered_gamma", True, "model.norm.weight", "its difference from 1"),
        ("attention_output_gate", True, "model.layers.1.self_attn.k_proj.weight", "gates"),
        ("gated_linear_unit", False, "model.layers.0.mlp.up_proj.weight", "without a gate"),
        (
            "moe_mlp_glu_interleave_size",
            32,
            "model.layers.1.mlp.experts.3.gate_proj.weight",
            "interleaved",
        ),
        (
            "moe_shared_expert_glu_interleave_size",
            32,
            "model.layers.1.mlp.shared_expert.gate_proj.weight",
            "interleaved",
        ),
        ("num_query_groups", 4, "model.layers.0.self_attn.q_proj.weight", "are not 4 groups"),
    ],
)
def test_what_is_held_in_another_way_is_named_as_the_checkpoint_does(
    setting: str, value: Any, name: str, why: str
) -> None:
    sizes = Sizes()
    model = standing(sizes.checkpoint(), sizes)
    setattr(model.config, setting, value)
    found, left_out = slots(model)
    assert why in left_out[name] and name not in {slot.name for slot in found}


def test_a_parameter_of_another_kind_is_left_out() -> None:
    class Float8Tensor(torch.Tensor):
        pass

    sizes = Sizes()
    model = standing(sizes.checkpoint(), sizes)
    quantised = torch.zeros(sizes.hidden).as_subclass(Float8Tensor)
    model.get_submodule("decoder.final_layernorm").weight = torch.nn.Parameter(quantised)
    assert slots(model)[1] == {"model.norm.weight": "held as Float8Tensor"}


def test_padded_rows_are_parts_only_without_a_vocabulary() -> None:
    sizes = Sizes(vocab=5, padded=12)
    held = sizes.checkpoint()
    with at(Place(tensor=(1, 2))):
        found, _ = slots(standing(held, sizes, Place(tensor=(1, 2))))
    whole = {slot.name: slot for slot in found}["lm_head.weight"]
    assert whole.extents[0] == (6, 12, 12)
    with at(Place(tensor=(1, 2))):
        found, _ = slots(standing(held, sizes, Place(tensor=(1, 2))), vocab=5)
    # this rank holds padding alone
    assert "lm_head.weight" not in {slot.name for slot in found}


@pytest.mark.parametrize(
    ("vocab", "said"),
    [
        (0, "vocab=0 is no number of rows"),
        (-1, "vocab=-1 is no number of rows"),
        (13, "the 12 rows of model.embed_tokens.weight hold no vocabulary of 13"),
    ],
)
def test_a_vocabulary_that_the_rows_do_not_hold_is_refused(
    vocab: int, said: str, tmp_path: Path
) -> None:
    sizes = Sizes(vocab=5, padded=12)
    held = sizes.checkpoint()
    save_file(held, tmp_path / "model.safetensors")
    model = standing(held, sizes)
    before = {name: value.clone() for name, value in tensors_of(model).items()}
    for refusing in (slots, fingerprints, partial(load_checkpoint, directory=tmp_path)):
        with pytest.raises(LayerBisectError, match=said):
            refusing(model, vocab=vocab)
    assert all(torch.equal(value, before[name]) for name, value in tensors_of(model).items())


def test_fingerprints_are_of_whole_tensors_in_the_checkpoint_s_order() -> None:
    sizes = Sizes()
    held = sizes.checkpoint()
    expected = {name: fingerprint(whole) for name, whole in held.items()}
    assert fingerprints(standing(held, sizes), vocab=sizes.vocab) == expected
    place = Place(tensor=(1, 2), expert=(1, 2))
    with at(place):
        made = fingerprints(standing(held, sizes, place), vocab=sizes.vocab)
    assert made.items() <= expected.items()
    assert "model.layers.1.mlp.gate.weight" in made and "model.norm.weight" in made
    # experts are whole, though their modules are others' neighbours
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in made
    assert "model.layers.0.self_attn.q_proj.weight" not in made


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    sizes = Sizes()
    held = sizes.checkpoint()

    def refused(name: str, tensors: Tensors) -> str:
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        model = standing(held, sizes)
        before = {n: t.clone() for n, t in tensors_of(model).items()}
        with pytest.raises(LayerBisectError) as raised:
            load_checkpoint(model, tmp_path / name)
        assert all(torch.equal(t, before[n]) for n, t in tensors_of(model).items())
        return str(raised.value)

    query = "model.layers.1.self_attn.q_proj.weight"
    said = refused("lacking", {n: t for n, t in held.items() if n != query})
    assert f"holds no tensor {query}" in said
    said = refused("wide", held | {query: torch.zeros(16, 7)})
    assert f"{query} in" in said and "has shape [16, 7], and the model wants [16, 6]" in said
    said = refused("quantised", held | {query: held[query].to(torch.float8_e4m3fn)})
    assert "is F8_E4M3, not one of" in said
    said = refused("large", Sizes(vocab=13, padded=13).checkpoint())
    assert "the 12 rows of model.embed_tokens.weight hold no vocabulary of 13" in said
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelDirectoryError, match="no safetensors file in"):
        load_checkpoint(standing(held, sizes), tmp_path / "empty")
    torn = tmp_path / "lacking" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-9])
    with pytest.raises(ModelDirectoryError, match="is no whole checkpoint"):
        load_checkpoint(standing(held, sizes), torn.parent)


def test_a_checkpoint_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    sizes = Sizes()
    held = sizes.checkpoint()
    names = sorted(held)
    parts = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    for file, own in parts.items():
        save_file({name: held[name] for name in own}, tmp_path / file)
    # what the index does not name is not read
    save_file({n: t * 2 for n, t in held.items()}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = standing({n: torch.zeros_like(t) for n, t in held.items()}, sizes)
    load_checkpoint(model, tmp_path)
    expected = parameters(held, sizes, ALONE)
    assert all(torch.equal(v, expected[n]) for n, v in tensors_of(model).items())
