"""Names of points, and the patterns that choose among them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.points import LARGE, LAYER_DIMS, MOE_SUFFIXES, all_points, parse, select


@given(st.integers(1, 80), st.booleans())
def test_every_point_parses_to_itself(num_layers: int, moe: bool) -> None:
    names = all_points(num_layers, moe)
    assert len(set(names)) == len(names)
    per_layer = len(LAYER_DIMS) - 1 - (0 if moe else len(MOE_SUFFIXES))
    # embed, the last layer's output, final_norm, logits, logprob
    assert len(names) == num_layers * per_layer + 5
    for name in names:
        point = parse(name)
        assert point.name == name
        assert point.dims[0] == "row"
        assert (point.layer is None) == ("layers." not in name)
        if point.layer is not None:
            assert name == f"layers.{point.layer}.{point.suffix}"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "layers",
        "layers.3",
        "layers.3.",
        "layers.x.input",
        "layers.-1.input",
        "layers.03.input",
        "layers.٣.input",
        "layers.3.input ",
        "layers.3.attn",
        "layers.3.embed",
        "input",
        "Embed",
    ],
)
def test_unknown_point_is_refused(name: str) -> None:
    with pytest.raises(LayerBisectError, match=re.escape(repr(name))):
        parse(name)


def test_order_is_that_of_computation() -> None:
    assert all_points(2, moe=[1])[:3] == ("embed", "layers.0.input", "layers.0.attn.norm")
    assert all_points(2)[-5:] == (
        "layers.1.mlp.out",
        "layers.1.output",
        "final_norm",
        "logits",
        "logprob",
    )
    assert [n for n in all_points(3) if n.endswith(".output")] == ["layers.2.output"]


def test_only_sparse_layers_have_a_router() -> None:
    routed = {parse(n).layer for n in all_points(5, moe=[1, 3]) if "router" in n}
    assert routed == {1, 3}


def test_presets() -> None:
    assert select("coarse", 3) == (
        "layers.0.input",
        "layers.1.input",
        "layers.2.input",
        "layers.2.output",
        "final_norm",
        "logprob",
    )
    everything = select("all", 3, moe=True)
    assert everything == tuple(n for n in all_points(3, moe=True) if parse(n).suffix not in LARGE)
    assert select("logits", 3) == ("logits",)


def test_what_goes_in_and_out_of_experts_is_asked_for_by_name_or_pattern() -> None:
    assert select("layers.1.mlp.expert_*", 2, moe=True) == (
        "layers.1.mlp.expert_ids",
        "layers.1.mlp.expert_weights",
        "layers.1.mlp.expert_in",
        "layers.1.mlp.expert_out",
    )
    assert parse("layers.1.mlp.expert_out").dims == ("row", "slot", "hidden")
    for pattern in ("all", "layers.1"):
        chosen = select(pattern, 2, moe=True)
        assert "layers.1.mlp.expert_ids" in chosen
        assert not [n for n in chosen if n.endswith(("expert_in", "expert_out"))]
    with pytest.raises(LayerBisectError, match="no point matches"):
        select("layers.*.mlp.expert_in", 2)


def test_patterns_give_points_in_order_of_computation_whatever_their_own() -> None:
    assert select("logprob, layers.1.attn.?, embed", 2) == (
        "embed",
        "layers.1.attn.q",
        "layers.1.attn.k",
        "layers.1.attn.v",
        "logprob",
    )
    assert select(["layers.1.mid", "layers.1.mid"], 2) == ("layers.1.mid",)


def test_a_layer_is_its_points_and_the_stream_that_leaves_it() -> None:
    chosen = select("layers.1", 12)
    assert {parse(n).layer for n in chosen if n != "layers.2.input"} == {1}
    assert len(chosen) == len(LAYER_DIMS) - 1 - len(MOE_SUFFIXES) + 1
    assert chosen[-1] == "layers.2.input"
    assert select("layers.11", 12)[-1] == "layers.11.output"


@pytest.mark.parametrize("pattern", ["layers.9", "nothing", "layers.*.mlp.router_logits", "a,,b"])
def test_pattern_that_matches_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(LayerBisectError, match="no point matches .* in a model of 4 layers"):
        select(pattern, 4)


def test_asking_for_no_points_is_refused() -> None:
    with pytest.raises(LayerBisectError, match="ask for 'coarse'"):
        select([], 4)
    with pytest.raises(LayerBisectError, match="no point matches ''"):
        select("", 4)
