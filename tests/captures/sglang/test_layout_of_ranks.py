"""Which part of a point a rank of an SGLang server holds."""

from typing import Any

import numpy as np
import pytest

from layerbisect.captures.points import parse
from layerbisect.captures.sglang.adapter import taps
from layerbisect.captures.sglang.layout import Layout
from layerbisect.captures.shards import Piece, assemble


def layout(rank: int = 0, size: int = 1, **more: Any) -> Layout:
    whole: dict[str, Any] = dict(
        rank=rank,
        world=size,
        tensor_rank=rank,
        tensor_size=size,
        attention_rank=rank,
        attention_size=size,
        pipeline_size=1,
        data_size=1,
        expert_size=1,
        heads=8,
        kv_heads=2,
        head_dim=4,
    )
    return Layout(**(whole | more))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("point", ["layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.context"])
def test_heads_tile_the_whole(point: str, size: int) -> None:
    parsed = parse(point)
    heads = 2 if point.endswith("k") else 8
    whole = np.random.default_rng(0).random((3, heads, 4), np.float32)
    held = max(1, heads // size)
    pieces = []
    for rank in range(size):
        # with more ranks than KV heads, neighbouring ranks hold copies of one head
        start = rank * heads // size // held * held
        header = layout(rank, size).header(parsed)
        values = whole[:, start : start + held]
        pieces.append(Piece(header, np.arange(3), values, "F32", f"rank-{rank}"))
    assembled = assemble(pieces, 3)
    np.testing.assert_array_equal(assembled.values, whole)
    assert not assembled.disagreements


@pytest.mark.parametrize("point", ["layers.0.attn.out", "layers.0.mlp.out"])
def test_outputs_are_partial_sums_under_tensor_parallelism(point: str) -> None:
    assert layout(1, 2).header(parse(point)).partial_sum == (1, 2)
    assert layout(1, 2).header(parse(point)).how == "partial_sum"
    assert layout().header(parse(point)).partial_sum is None


@pytest.mark.parametrize("point", ["embed", "layers.0.input", "layers.0.mlp.router_logits"])
def test_the_rest_is_whole_on_every_rank(point: str) -> None:
    header = layout(1, 2).header(parse(point))
    assert header.partial_sum is None
    assert not header.shards


@pytest.mark.parametrize(
    "more",
    [
        dict(size=4, attention_size=2, attention_rank=0, data_size=2),
        dict(size=2, tokens_travel=True),
    ],
)
def test_the_mlp_is_not_observable_where_it_works_on_other_rows(more: dict[str, Any]) -> None:
    shown = {t.point for t in taps(layout(**more), 2, lambda value: value)}
    assert "layers.{layer}.mid" in shown
    assert not any(".mlp." in point for point in shown)


def test_the_stream_after_the_last_layer_is_named_by_its_number() -> None:
    shown = {t.point for t in taps(layout(), 7, lambda value: value)}
    assert "layers.6.output" in shown
