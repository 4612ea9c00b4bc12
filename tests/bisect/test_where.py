"""A culprit says where it sits: positions, phase, experts, heads, channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Culprit
from layerbisect.captures.store import Capture
from layerbisect.fault_tools import forward_replaced
from tests.bisect.conftest import Clean
from tests.bisect.making import rewrite

Wrong = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def output_changed(module: Any, wrong: Wrong) -> Iterator[None]:
    """Change what a module puts out, [batch, row, channel]."""

    def forward(own: Any, *args: Any, **kwargs: Any) -> Any:
        return wrong(own(*args, **kwargs))

    with forward_replaced(module, forward):
        yield


def culprit(clean: Clean, tmp_path: Path, module: str, wrong: Wrong, **given: Any) -> Culprit:
    engine = clean.engines["rollout"]
    with ExitStack() as stack:
        stack.enter_context(output_changed(engine.model.get_submodule(module), wrong))
        made = engine.capture(tmp_path / "faulty", clean.tokens, **given)
    (found,) = bisect(made, clean.trainer, model=clean.model).culprits
    assert found.side == "rollout"
    return found


O_PROJ = "model.layers.2.self_attn.o_proj"


def test_positions_from_one_on(clean: Clean, tmp_path: Path) -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :30], 1.1 * x[:, 30:]], 1)

    found = culprit(clean, tmp_path, O_PROJ, wrong)
    assert (found.layer, found.operator, found.where) == (2, "linear", "positions >= 30")


def test_positions_up_to_one(clean: Clean, tmp_path: Path) -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([1.2 * x[:, :11], x[:, 11:]], 1)

    assert culprit(clean, tmp_path, O_PROJ, wrong).where == "positions <= 10"


def test_one_position_of_each_sequence_is_enough(clean: Clean, tmp_path: Path) -> None:
    # 3 of 144 rows, as at the boundary of a chunk
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :20], 1.5 * x[:, 20:21], x[:, 21:]], 1)

    found = culprit(clean, tmp_path, O_PROJ, wrong)
    assert found.where == "position 20" and found.operator == "linear"


def test_one_row_of_all_is_enough_where_it_is_far_off(clean: Clean, tmp_path: Path) -> None:
    counter = iter(range(100))

    def wrong(x: torch.Tensor) -> torch.Tensor:
        if next(counter) == 1:
            x = x.clone()
            x[:, 33] *= 2
        return x

    found = culprit(clean, tmp_path, O_PROJ, wrong)
    assert found.operator == "linear" and found.where == "1 row, at position 33"
    assert "1 of 144 rows err more than 32x rounding" in found.evidence[0]


def test_one_sequence(clean: Clean, tmp_path: Path) -> None:
    assert sequences_of(clean, tmp_path, lambda name: name, {1}) == "sequence s1"


def test_several_sequences(clean: Clean, tmp_path: Path) -> None:
    assert sequences_of(clean, tmp_path, lambda name: name, {0, 2}) == "sequences s0, s2"


def test_the_sequences_of_one_data_parallel_rank(clean: Clean, tmp_path: Path) -> None:
    def named(name: str) -> str:
        return {"s0": "dp0.s0", "s1": "dp1.s0", "s2": "dp1.s1"}[name]

    assert sequences_of(clean, tmp_path, named, {1, 2}) == "sequences dp1.*"
    assert sequences_of(clean, tmp_path / "one", named, {2}) == "sequence dp1.s1"


def sequences_of(clean: Clean, tmp_path: Path, named: Callable[[str], str], wrong: set[int]) -> str:
    """Say where an error of some sequences is said to be."""
    tmp_path.mkdir(exist_ok=True)
    names = [named(f"s{number}") for number in range(3)]
    counter = iter(range(100))

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return 1.2 * x if next(counter) in wrong else x

    found = culprit(clean, tmp_path, O_PROJ, scaled, names=names)
    assert (found.layer, found.operator) == (2, "linear")
    return found.where


@pytest.mark.parametrize(("module", "operator"), [("q_proj", "linear"), ("q_norm", "norm")])
@pytest.mark.parametrize("share", [1, 3])
def test_queries_of_some_sequences_tell_the_projection_from_the_norm(
    clean: Clean, tmp_path: Path, module: str, operator: str, share: int
) -> None:
    counter = iter(range(100))
    noise = 1 + 0.03 * torch.randn(2048, generator=torch.Generator().manual_seed(3))

    def wrong(x: torch.Tensor) -> torch.Tensor:
        if next(counter) >= share:
            return x
        # a wrong weight by channel, and wrong columns of a projection
        by_channel = noise[: x.shape[-1]].to(x.dtype)
        return x * by_channel if module == "q_norm" else x + 0.03 * x.roll(1, -1)

    found = culprit(clean, tmp_path, f"model.layers.1.self_attn.{module}", wrong)
    assert (found.point, found.operator) == ("layers.1.attn.q", operator)
    assert found.where == ("sequence s0" if share == 1 else "all rows")


def test_decode_rows_alone(clean: Clean, tmp_path: Path) -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return 1.2 * x if x.shape[1] == 1 else x

    found = culprit(clean, tmp_path, O_PROJ, wrong, layout="decode")
    assert found.where == "decode rows"


def test_one_head(clean: Clean, tmp_path: Path) -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        head = torch.zeros(x.shape[-1]).bool()
        head[32:64] = True
        return torch.where(head, x * 1.012, x)

    found = culprit(clean, tmp_path, "model.layers.1.self_attn.v_proj", wrong)
    assert found.operator == "linear" and found.point == "layers.1.attn.v"
    assert found.where == "head 1"


def test_one_channel(clean: Clean, tmp_path: Path) -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(x.shape[-1]) == 77, x * 1.02, x)

    found = culprit(clean, tmp_path, O_PROJ, wrong)
    assert found.where == "channel 77"


def test_the_tokens_of_one_expert(clean: Clean, tmp_path: Path) -> None:
    experts = clean.engines["rollout"].model.model.layers[2].mlp.experts
    before = experts.down_proj.data[5].clone()
    experts.down_proj.data[5] *= 1.3
    try:
        made = clean.engines["rollout"].capture(tmp_path / "faulty", clean.tokens)
    finally:
        experts.down_proj.data[5] = before
    bare = rewrite(made, tmp_path / "bare", info={"fingerprints": {}})
    (found,) = bisect(bare, clean.trainer, model=clean.model).culprits
    assert (found.layer, found.operator) == (2, "experts")
    assert found.where == "tokens routed to expert 5"


@pytest.mark.parametrize("ranks", [2, 8])
def test_partial_sums_of_several_ranks_accuse_nobody(
    clean: Clean, ranks: int, tmp_path: Path
) -> None:
    """An all-reduce in bfloat16 rounds more often than one projection."""
    model = clean.engines["rollout"].model
    draw = torch.Generator().manual_seed(0)

    def reduced(x: torch.Tensor) -> torch.Tensor:
        # the parts of a sum, each stored in bfloat16, and added one by one
        size = x.float().square().mean().sqrt()
        parts = torch.randn(ranks, *x.shape, generator=draw) * size / ranks**0.5
        parts -= parts.mean(0) - x.float() / ranks
        total = torch.zeros_like(x)
        for part in parts:
            total = total + part.to(x.dtype)
        return total

    with ExitStack() as stack:
        for layer in model.model.layers:
            stack.enter_context(output_changed(layer.self_attn.o_proj, reduced))
        made = clean.engines["rollout"].capture(tmp_path / "reduced", clean.tokens)
    told = rewrite(made, tmp_path / "told", info={"parallel": {"tp": ranks}})
    verdict = bisect(told, clean.trainer, model=clean.model)
    assert verdict.culprits == () and verdict.status == "agree", verdict.culprits


def test_rows_of_a_near_tie_are_set_aside(clean: Clean, tmp_path: Path) -> None:
    # without the router's points its choices are computed, and two engines may choose otherwise
    hidden = ("router_logits", "expert_ids", "expert_weights")
    made = [
        rewrite(getattr(clean, side), tmp_path / side, points=lambda n: not n.endswith(hidden))
        for side in ("rollout", "trainer")
    ]
    verdict = bisect(made[0], made[1], model=clean.model)
    assert verdict.status == "agree"
    ids = Capture.open(clean.rollout).read("layers.0.mlp.expert_ids")
    assert len(np.unique(ids)) == 8
