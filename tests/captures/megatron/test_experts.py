"""What goes into the experts of the real megatron-core and comes out of them, slot by slot."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import layerbisect
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.captures.megatron.experts import by_slot, orders, unseen
from layerbisect.captures.megatron.model import Chunk
from layerbisect.captures.megatron.place import Place
from layerbisect.captures.store import Capture
from layerbisect.loading import load_model
from layerbisect.models import make_tiny
from scripts.megatron_engine import run_job
from scripts.megatron_model import Layout

LAYERS, EXPERTS, TOP_K = 4, 8, 3
INSIDE = ("mlp.norm", "mlp.expert_ids", "mlp.expert_weights", "mlp.out")
POINTS = "all,layers.*.mlp.expert_*"


@given(st.data())
def test_rows_in_the_order_of_experts_come_back_to_the_slots_of_their_tokens(
    data: st.DataObject,
) -> None:
    experts = data.draw(st.integers(1, 6))
    chosen = st.sets(st.integers(0, experts - 1), max_size=experts)
    sent = [sorted(one) for one in data.draw(st.lists(chosen, min_size=1, max_size=7))]
    slots = max(1, *map(len, sent)) + data.draw(st.integers(0, 1))
    routed = torch.zeros(len(sent), experts, dtype=torch.bool)
    for token, numbers in enumerate(sent):
        routed[token, numbers] = True
    # a row says which token it is of, and where it goes
    rows = [
        [float(token + 1), float(expert)]
        for expert in range(experts)
        for token, numbers in enumerate(sent)
        if expert in numbers
    ]
    placed = by_slot(torch.tensor(rows).reshape(-1, 2), routed, slots)
    assert placed.shape == (len(sent), slots, 2)
    for token, numbers in enumerate(sent):
        for slot in range(slots):
            used = slot < len(numbers)
            wanted = [token + 1, numbers[slot]] if used else [0, 0]
            assert placed[token, slot].tolist() == wanted


def test_other_rows_than_the_map_has_are_refused() -> None:
    routed = torch.tensor([[True, True, False], [False, True, True]])
    with pytest.raises(ValueError, match="given 5 rows where .* sends 4.*padding_for_quant"):
        by_slot(torch.zeros(5, 3), routed, 2)
    with pytest.raises(ValueError, match="in 2 slots where it has 1"):
        by_slot(torch.zeros(4, 3), routed, 1)


def chunk_of(**config: Any) -> Any:
    """What is asked of a chunk with one layer, on a CPU; no such job can run there."""
    settings = {"num_moe_experts": 8, "moe_permute_fusion": False, "moe_latent_size": None}
    model = SimpleNamespace(config=SimpleNamespace(**settings | config))
    model.parameters = lambda: iter([torch.zeros(1)])
    return Chunk(model, 0, 1, {3: "decoder.layers.0"})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"moe_token_dispatcher_type": "flex"}, "kernels of its own"),
        ({"moe_token_dispatcher_type": "alltoall", "moe_latent_size": 16}, "latent space"),
    ],
)
def test_rows_that_kernels_or_projections_hide_are_not_observable(
    config: dict[str, Any], why: str
) -> None:
    hidden = unseen(chunk_of(**config), Place())
    assert set(hidden) == {"layers.3.mlp.expert_in", "layers.3.mlp.expert_out"}
    assert all(why in seen.reason for seen in hidden.values())


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ({"moe_token_dispatcher_type": "flex"}, "as the kernels of the flex dispatcher have it"),
        (
            {"moe_token_dispatcher_type": "alltoall", "moe_permute_fusion": True},
            "in a kernel of TransformerEngine",
        ),
        ({"num_moe_experts": None}, None),
    ],
)
def test_the_order_of_addition_is_said_where_it_is_known(
    config: dict[str, Any], added: str | None
) -> None:
    assert orders(chunk_of(**config), Place()).get("moe_combine_order") == added


pytest.importorskip("megatron.core", reason="CI has megatron-core")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        tmp_path_factory.mktemp("models") / "moe",
        "qwen3_moe",
        layers=LAYERS,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        experts=EXPERTS,
        top_k=TOP_K,
        intermediate=32,
        vocab=256,
        dtype="float32",
    )


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (n,), generator=generator).tolist() for n in (24, 17, 24, 9)]


def job(model: Path, layout: Layout, *steps: dict[str, Any], dispatcher: str, **config: Any) -> Any:
    """Run forward steps in float32 with a dispatcher, and return what rank 0 says of each."""
    exact = {"bf16": False, **config}
    given: dict[str, Any] = {"model": str(model), "config": exact, "steps": list(steps)}
    if dispatcher == "allgather":
        return run_job(given, layout)[0]
    do = {"do": "tests.megatron_experts:alltoall", "config": exact, "steps": list(steps)}
    return run_job({**given, "config": {"bf16": False}, "steps": [do]}, layout)[0][0]


def reference_outputs(model: Path, capture: Capture, layer: int) -> np.ndarray[Any, Any]:
    """Each slot's expert alone, [row, slot, hidden], from what the capture says of its input."""
    judge = ReferenceModel.from_directory(model, torch.float64)
    normed, ids, weights = (
        torch.from_numpy(capture.read(f"layers.{layer}.{suffix}")) for suffix in INSIDE[:3]
    )
    made = []
    for slot in range(TOP_K):
        alone = torch.full_like(ids, -1)
        alone[:, slot] = ids[:, slot]
        made.append(judge.mlp(layer, normed.double(), alone.long(), weights.double()))
    return torch.stack(made, 1).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dispatcher", "layout"),
    [
        ("allgather", Layout()),
        ("allgather", Layout(pipeline=2)),
        ("allgather", Layout(tensor=2, expert_tensor=1)),
        ("alltoall", Layout(pipeline=2)),
        ("alltoall", Layout(expert=2)),
        ("alltoall", Layout(pipeline=2, expert=2)),
        ("alltoall", Layout(tensor=2)),
    ],
    ids=lambda given: given if isinstance(given, str) else _words(given),
)
def test_each_slot_is_its_expert_on_its_row(
    dispatcher: str, layout: Layout, model: Path, tokens: list[list[int]], tmp_path: Path
) -> None:
    step = {"do": "forward", "tokens": tokens, "micro_batch": 2}
    recorded = step | {"capture": str(tmp_path / "c"), "points": POINTS.split(",")}
    before, during, after = job(model, layout, step, recorded, step, dispatcher=dispatcher)
    assert before == during == after
    capture = Capture.open(tmp_path / "c")
    assert capture.finished and capture.problems == ()
    assert capture.replica_findings == {}
    spread = layout.expert > 1 or (layout.tensor > 1 and layout.expert_tensor is None)
    for layer in range(LAYERS):
        at = f"layers.{layer}.mlp."
        normed, out = capture.read(at + "norm"), capture.read(at + "out")
        given_back = capture.read(at + "expert_out")
        assert given_back.shape == (len(normed), TOP_K, 64)
        # floating-point addition tells orders apart
        total = np.zeros_like(out)
        for slot in range(TOP_K):
            total += given_back[:, slot]
        np.testing.assert_array_equal(total, out)
        expected = reference_outputs(model, capture, layer)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(given_back / scale, expected / scale, atol=1e-5)
        seen = capture.points[at + "expert_in"]
        if spread:
            assert seen.how == "not_observable" and "other ranks" in seen.reason
        else:
            arrived = capture.read(at + "expert_in")
            np.testing.assert_array_equal(arrived, np.stack([normed] * TOP_K, 1))
    order = capture.info.environment
    assert order["moe_token_dispatcher_type"] == dispatcher
    assert order["moe_combine_order"] == "by expert number"


def _words(layout: Layout) -> str:
    return f"tp{layout.tensor}-pp{layout.pipeline}-ep{layout.expert}-etp{layout.expert_tensor}"


@pytest.mark.slow
def test_where_a_collective_adds_experts_up_they_are_not_observable(
    model: Path, tokens: list[list[int]], tmp_path: Path
) -> None:
    step = {"do": "forward", "tokens": tokens, "capture": str(tmp_path / "c")}
    asked = step | {"points": ["layers.1.mlp.expert_*", "coarse"]}
    job(model, Layout(expert=2), asked, dispatcher="allgather")
    capture = Capture.open(tmp_path / "c")
    assert capture.finished and capture.problems == ()
    for name in ("expert_in", "expert_out"):
        seen = capture.points[f"layers.1.mlp.{name}"]
        assert seen.how == "not_observable" and "collective" in seen.reason
    assert capture.has("layers.1.mlp.expert_ids").all()
    assert capture.info.environment["moe_combine_order"] == "by expert number, then over ranks"


@pytest.mark.slow
def test_rows_that_are_padded_to_a_capacity_cannot_be_placed_and_cost_nothing_else(
    model: Path, tokens: list[list[int]], tmp_path: Path
) -> None:
    step = {"do": "forward", "tokens": tokens, "capture": str(tmp_path / "c")}
    asked = step | {"points": ["layers.1", "layers.1.mlp.expert_*"]}
    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    job(model, Layout(), asked, dispatcher="alltoall", **padded)
    capture = Capture.open(tmp_path / "c")
    assert capture.finished
    for name in ("expert_in", "expert_out"):
        wanted = f"layers.1.mlp.{name}: ValueError: the experts are given a token in"
        assert any(wanted in problem for problem in capture.problems)
    assert not capture.has("layers.1.mlp.expert_in").any()
    assert capture.has("layers.1.mlp.out").all()


def test_another_engine_says_that_it_cannot_see_them_only_where_they_were_asked_for(
    model: Path, tmp_path: Path
) -> None:
    engine: Any = load_model(model, dtype="float32", attention="eager")
    for name, points in (("all", "all"), ("asked", POINTS)):
        with layerbisect.capture(engine, tmp_path / name, points=points), torch.no_grad():
            engine(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    assert "layers.1.mlp.expert_in" not in Capture.open(tmp_path / "all").points
    seen = Capture.open(tmp_path / "asked").points["layers.1.mlp.expert_in"]
    assert seen.how == "not_observable" and "no module" in seen.reason
