"""A capture's expert routes are looked up by prefix, and forced in another run of the model."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from layerbisect.captures.capture import capture
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.format import CaptureInfo, SequenceInfo, TensorHeader
from layerbisect.captures.points import parse
from layerbisect.captures.routes import IDS, WEIGHTS, Routes
from layerbisect.captures.rows import PrefixKeys, Rows
from layerbisect.captures.store import Capture
from layerbisect.captures.telling import CaptureWarning
from layerbisect.captures.transformers_calls import cache_name
from layerbisect.captures.writer import CaptureWriter
from layerbisect.cli import main
from layerbisect.faults import plant

LAYERS, EXPERTS, SLOTS, VOCAB = 4, 8, 2, 512
ROUTED = (f"layers.*.{IDS}", f"layers.*.{WEIGHTS}", "layers.*.mlp.router_logits", "logprob")
TOKENS = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(small_moe_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(small_moe_dir, dtype=torch.bfloat16).eval()


def run(model: Any, out: Path, tokens: torch.Tensor = TOKENS, **options: Any) -> torch.Tensor:
    """Capture whole sequences; returns the logits."""
    options.setdefault("points", ROUTED)
    with capture(model, out, **options), torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


@contextmanager
def rerouted(
    model: Any, route: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[None]:
    """An engine whose gates choose by ``route``: from logits to weights and experts."""
    gates = [layer.mlp.gate for layer in model.model.layers]
    for gate in gates:
        own = gate.forward

        def forward(hidden: torch.Tensor, own: Any = own) -> tuple[torch.Tensor, ...]:
            logits = own(hidden)[0]
            return (logits, *route(logits))

        gate.forward = forward
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward


def the_worst(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that no router would take, the later one first; weights in float32."""
    ids = logits.float().topk(SLOTS, largest=False).indices
    ids = ids.sort(descending=True).values
    weights = torch.softmax(logits.float().gather(1, ids) / 3, -1)
    return weights, ids


@pytest.fixture(scope="module")
def odd(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """A rollout with experts and weights of its own."""
    out = tmp_path_factory.mktemp("odd") / "rollout"
    with rerouted(model, the_worst):
        run(model, out, label="rollout")
    return Capture.open(out)


def test_an_engines_own_routes_change_no_bit(model: Any, tmp_path: Path) -> None:
    own = run(model, tmp_path / "own")
    forced = run(model, tmp_path / "forced", routes=tmp_path / "own")
    weighted = run(model, tmp_path / "weighted", routes=tmp_path / "own", route_weights=True)
    assert torch.equal(own, forced) and torch.equal(own, weighted)
    kinds = [Capture.open(tmp_path / n).info.routes for n in ("own", "forced", "weighted")]
    assert kinds == ["own", "forced", "forced with weights"]
    said = json.loads((tmp_path / "forced" / "capture.json").read_text())
    assert said["routes"] == "forced"


def test_given_experts_are_used_in_their_slots_with_the_gates_own_weights(
    model: Any, odd: Capture, tmp_path: Path
) -> None:
    run(model, tmp_path / "own")
    run(model, tmp_path / "forced", routes=odd)
    own, forced = Capture.open(tmp_path / "own"), Capture.open(tmp_path / "forced")
    assert forced.finished and not forced.problems
    first = "layers.0.mlp.router_logits"
    assert np.array_equal(forced.read(first), own.read(first))
    for layer in range(LAYERS):
        ids = forced.read(f"layers.{layer}.{IDS}")
        assert np.array_equal(ids, odd.read(f"layers.{layer}.{IDS}"))
        assert not np.array_equal(ids, own.read(f"layers.{layer}.{IDS}"))
        scores = torch.from_numpy(forced.read(f"layers.{layer}.mlp.router_logits")).softmax(-1)
        expected = scores.gather(1, torch.from_numpy(ids))
        expected = (expected / expected.sum(-1, keepdim=True)).bfloat16().float()
        assert np.array_equal(forced.read(f"layers.{layer}.{WEIGHTS}"), expected.numpy())


def test_given_weights_are_used_to_the_bit(model: Any, odd: Capture, tmp_path: Path) -> None:
    with rerouted(model, the_worst):
        rollout = run(model, tmp_path / "rollout")
    logits = run(model, tmp_path / "forced", routes=odd, route_weights=True)
    forced = Capture.open(tmp_path / "forced")
    for layer in range(LAYERS):
        for suffix in (IDS, WEIGHTS):
            point = f"layers.{layer}.{suffix}"
            assert np.array_equal(forced.read(point), odd.read(point))
    # the two engines differ in nothing else
    assert torch.equal(logits, rollout)


def test_a_gap_that_routes_made_shrinks_when_they_are_forced(
    tiny_moe_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_dir, dtype=torch.bfloat16).eval()
    tokens = torch.randint(VOCAB, (4, 64), generator=torch.Generator().manual_seed(0))
    with ExitStack() as faults:
        for layer in range(model.config.num_hidden_layers):
            faults.enter_context(plant(model, "router-low-precision", layer))
        run(model, tmp_path / "rollout", tokens, label="rollout")
    rollout = Capture.open(tmp_path / "rollout")
    kinds: dict[str, dict[str, Any]] = {
        "own": {},
        "forced": {"routes": rollout},
        "weights": {"routes": rollout, "route_weights": True},
    }
    gap = {}
    for name, options in kinds.items():
        run(model, tmp_path / name, tokens, **options)
        scores = Capture.open(tmp_path / name).scores
        gap[name] = np.abs(scores.logprob - rollout.scores.logprob).mean()
    # nothing but the routers differs: what is left with routes forced is the weights'
    assert gap["own"] > 1.1 * gap["forced"] > 0
    assert gap["weights"] == 0


def test_what_the_gate_does_with_its_weights_stays(model: Any, tmp_path: Path) -> None:
    with plant(model, "top-k-not-renormalised", 2):
        own = run(model, tmp_path / "own")
        forced = run(model, tmp_path / "forced", routes=tmp_path / "own")
    assert torch.equal(own, forced)
    total = Capture.open(tmp_path / "forced").read(f"layers.2.{WEIGHTS}").sum(1)
    assert (total < 0.99).all()


def test_decode_steps_and_packed_sequences_find_whole_sequences(
    model: Any, odd: Capture, tmp_path: Path
) -> None:
    with capture(model, tmp_path / "d", points=ROUTED, routes=odd), torch.no_grad():
        held = cache_name(model)
        out = model(input_ids=TOKENS[:, :17], use_cache=True)
        for step in range(17, 20):
            out = model(input_ids=TOKENS[:, step : step + 1], **{held: out[held]})
    positions = torch.arange(20).repeat(2)[None]
    with capture(model, tmp_path / "p", points=ROUTED, routes=odd), torch.no_grad():
        model(input_ids=TOKENS.reshape(1, -1), position_ids=positions, use_cache=False)
    for name in ("d", "p"):
        taken = Capture.open(tmp_path / name)
        assert not taken.problems
        keys, ids = taken.keys, taken.read(f"layers.3.{IDS}")
        assert np.array_equal(ids, Routes.of(odd).look_up(3, keys).ids)


def test_rows_without_a_route_keep_their_own(model: Any, odd: Capture, tmp_path: Path) -> None:
    tokens = TOKENS.clone()
    # from here on the second sequence has another prefix
    tokens[1, 13] += 1
    mask = torch.ones_like(tokens)
    # padding is no row
    mask[0, :2] = 0
    padded = torch.cat([tokens.new_zeros(1, 2), tokens[:1, :18]], 1)
    padded = torch.cat([padded, tokens[1:]])
    with (
        pytest.warns(CaptureWarning, match="7 of 38 rows kept their own routes"),
        capture(model, tmp_path / "c", points=ROUTED, routes=odd),
        torch.no_grad(),
    ):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(input_ids=padded, attention_mask=mask, position_ids=positions, use_cache=False)
    forced = Capture.open(tmp_path / "c")
    assert any("7 of 38 rows kept their own routes" in p for p in forced.problems)
    known = np.isin(forced.keys.key, odd.keys.key)
    assert (~known).sum() == 7
    for layer in range(LAYERS):
        logits = torch.from_numpy(forced.read(f"layers.{layer}.mlp.router_logits"))
        own = logits.softmax(-1).topk(SLOTS).indices.numpy()
        ids = forced.read(f"layers.{layer}.{IDS}")
        assert np.array_equal(ids[~known], own[~known])
        assert (ids[known] != own[known]).any()


def test_no_route_at_all_is_said(model: Any, odd: Capture, tmp_path: Path) -> None:
    with pytest.warns(CaptureWarning, match="all 40 rows kept their own routes"):
        run(model, tmp_path / "other", TOKENS + 0, routes=odd, salts=["adapter", "adapter"])
    assert Capture.open(tmp_path / "other").problems


def test_the_model_is_itself_again(model: Any, odd: Capture, tmp_path: Path) -> None:
    with torch.no_grad():
        before = model(input_ids=TOKENS, use_cache=False).logits
        with capture(model, tmp_path / "a", points=ROUTED, routes=odd):
            assert not torch.equal(model(input_ids=TOKENS, use_cache=False).logits, before)
            # not recorded, hence not forced
            own = model.model(input_ids=TOKENS, use_cache=False).last_hidden_state
        assert torch.equal(model.lm_head(own), before)
        assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, before)
        with pytest.raises(RuntimeError, match="stop"):
            with capture(model, tmp_path / "b", points=ROUTED, routes=odd):
                handle = model.model.layers[2].mlp.experts.register_forward_pre_hook(_stop)
                try:
                    model(input_ids=TOKENS, use_cache=False)
                finally:
                    handle.remove()
        assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, before)
    assert not any("forward" in vars(layer.mlp.gate) for layer in model.model.layers)


def _stop(*_: Any) -> None:
    raise RuntimeError("stop")


def test_a_gate_that_chooses_in_another_way_is_not_said_to_be_forced(
    model: Any, odd: Capture, tmp_path: Path
) -> None:
    def sorting(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = logits.float().sort(descending=True).indices[:, :SLOTS]
        weights = logits.float().softmax(-1).gather(1, ids)
        return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ids

    with rerouted(model, sorting), pytest.warns(CaptureWarning, match="does not choose by a torch"):
        run(model, tmp_path / "c", routes=odd)
    problems = Capture.open(tmp_path / "c").problems
    assert any("all 40 rows kept their own routes" in p for p in problems)


def test_routes_of_another_model_or_of_none_are_refused(
    model: Any, odd: Capture, small_llama_dir: Path, tmp_path: Path
) -> None:
    run(model, tmp_path / "coarse", points="coarse")
    with pytest.raises(LayerBisectError, match=r"holds no expert_ids, .* points='layers\.\*\.mlp"):
        capture(model, tmp_path / "c", routes=tmp_path / "coarse")
    run(model, tmp_path / "some", points=("layers.1", f"layers.3.{IDS}"))
    with pytest.raises(LayerBisectError, match="no expert_ids of layers 0, 2"):
        capture(model, tmp_path / "c", routes=tmp_path / "some")
    run(model, tmp_path / "ids", points=f"layers.*.{IDS}")
    with pytest.raises(LayerBisectError, match="no expert_ids and expert_weights"):
        capture(model, tmp_path / "c", routes=tmp_path / "ids", route_weights=True)
    with pytest.raises(LayerBisectError, match="route_weights needs routes"):
        capture(model, tmp_path / "c", route_weights=True)
    llama = AutoModelForCausalLM.from_pretrained(small_llama_dir, dtype=torch.bfloat16)
    with pytest.raises(LayerBisectError, match="in a model without experts"):
        capture(llama, tmp_path / "c", routes=odd)
    assert not (tmp_path / "c").exists()


INFO = CaptureInfo(
    engine="test",
    engine_version="1",
    label="rollout",
    device="cpu",
    dtype="bfloat16",
    num_layers=LAYERS,
    moe_layers=tuple(range(LAYERS)),
    points=tuple(f"layers.{layer}.{IDS}" for layer in range(LAYERS)),
)


def written(folder: Path, passes: Sequence[tuple[str, Sequence[int], Any]]) -> Capture:
    """A capture of passes: a sequence's name, its tokens, and the experts of every layer."""
    writer = CaptureWriter(folder, INFO)
    for name, tokens, ids in passes:
        rows = Rows.of([0] * len(tokens), range(len(tokens)), tokens)
        tensors = {point: torch.as_tensor(ids) for point in INFO.points}
        headers = {point: TensorHeader(parse(point).dims) for point in INFO.points}
        writer.write_pass("prefill", [SequenceInfo(name)], rows, tensors, headers)
    writer.finish()
    return Capture.open(folder)


def test_looking_up_finds_known_prefixes_alone(tmp_path: Path) -> None:
    rollout = written(
        tmp_path / "c", [("a", [5, 6, 7], [[0, 1], [3, 2], [-1, -1]]), ("b", [9], [[4, 5]])]
    )
    routes = Routes.of(rollout)
    order = np.array([3, 1, 0, 1, 2])
    keys = PrefixKeys(rollout.keys.key[order], rollout.keys.known[order])
    choice = routes.look_up(0, keys)
    # the engine gave no expert to the third token of a
    assert choice.found.tolist() == [True, True, True, True, False]
    assert choice.ids.tolist() == [[4, 5], [3, 2], [0, 1], [3, 2], [-1, -1]]
    assert choice.weights is None
    unknown = PrefixKeys(keys.key, np.zeros(5, bool))
    assert not routes.look_up(0, unknown).found.any()
    assert routes.problems(5, 0) == []


def test_a_token_with_two_routes_is_told(tmp_path: Path) -> None:
    rollout = written(
        tmp_path / "c",
        [
            ("generated", [5, 6, 7], [[0, 1], [3, 2], [4, 5]]),
            # other slots are the same route
            ("replayed", [5, 6, 7], [[1, 0], [3, 6], [4, 5]]),
        ],
    )
    routes = Routes.of(rollout)
    assert routes.look_up(2, rollout.keys).ids[1].tolist() == [3, 2]
    (problem,) = routes.problems(6, 0)
    assert problem.startswith(f"1 rows have other experts of layer 2 in one pass of {tmp_path}")
    alone = Capture.open(tmp_path / "c", requests="replayed")
    assert Routes.of(alone).look_up(2, rollout.keys).ids[1].tolist() == [3, 6]


@pytest.mark.parametrize(
    "ids, said",
    [
        ([[0, 1, 2]] * 2, "name 3 experts a row where this router chooses 2"),
        ([[0, 8]] * 2, "name expert 8 of 8"),
        ([[0, 1], [3, 3]], "name an expert twice in one row"),
    ],
)
def test_routes_that_do_not_fit_the_router_are_told_and_not_used(
    model: Any, tmp_path: Path, ids: list[list[int]], said: str
) -> None:
    tokens = [3, 4]
    rollout = written(tmp_path / "rollout", [("a", tokens, ids)])
    with pytest.warns(CaptureWarning, match=said):
        logits = run(model, tmp_path / "c", torch.tensor([tokens]), routes=rollout)
    assert torch.equal(logits, run(model, tmp_path / "own", torch.tensor([tokens])))
    assert len(Capture.open(tmp_path / "c").problems) == LAYERS + 1


def test_the_command_line_forces_routes(small_moe_dir: Path, odd: Capture, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text("\n".join(json.dumps(row) for row in TOKENS.tolist()))
    call = ["capture", "--model", small_moe_dir, "--tokens", tokens, "--out", tmp_path / "out"]

    def invoke(*more: Any) -> Any:
        return CliRunner().invoke(main, [str(a) for a in (*call, *more)])

    refused = invoke("--route-weights")
    assert refused.exit_code == 2 and "--route-weights needs --routes" in refused.stderr
    refused = invoke("--routes", tmp_path)
    assert refused.exit_code == 2 and "holds no capture" in refused.stderr
    assert not (tmp_path / "out").exists()
    done = invoke("--routes", odd.directory, "--route-weights", "--points", "all")
    assert done.exit_code == 0 and "warning" not in done.stderr, done.stderr
    taken = Capture.open(tmp_path / "out")
    assert taken.info == replace(taken.info, routes="forced with weights")
    point = f"layers.2.{WEIGHTS}"
    found = Routes.of(odd, weights=True).look_up(2, taken.keys)
    assert found.found.all() and found.weights is not None
    assert np.array_equal(taken.read(point), found.weights)
