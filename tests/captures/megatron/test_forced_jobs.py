"""A job of the real megatron-core is made to use the experts of a transformers rollout."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import layerbisect
from layerbisect.bisect.join import join
from layerbisect.captures.routes import IDS, WEIGHTS, Routes
from layerbisect.captures.store import Capture
from layerbisect.loading import load_model
from layerbisect.models import make_tiny
from scripts.megatron_engine import run_job
from scripts.megatron_model import Layout

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
    pytest.mark.slow,
]
LAYERS, VOCAB = 4, 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = dict(
        layers=LAYERS, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, vocab=VOCAB
    )
    return make_tiny(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe", **sizes)


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    # of one length: padding on the right, which nothing tells from tokens, has no routes
    return torch.randint(VOCAB, (4, 24), generator=generator).tolist()


@pytest.fixture(scope="module")
def rollout(
    model: Path, tokens: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Capture:
    """An engine that chooses the fourth and the second expert, with weights in float32."""
    engine: Any = load_model(model)
    for layer in engine.model.layers:
        own = layer.mlp.gate.forward

        def forward(hidden: torch.Tensor, own: Any = own) -> tuple[torch.Tensor, ...]:
            logits = own(hidden)[0]
            ids = logits.float().topk(4).indices[:, [3, 1]]
            return logits, torch.softmax(logits.float().gather(1, ids) / 3, -1), ids

        layer.mlp.gate.forward = forward
    out = tmp_path_factory.mktemp("captures") / "rollout"
    with layerbisect.capture(engine, out, points="all", label="rollout"), torch.no_grad():
        for ids in tokens:
            engine(input_ids=torch.tensor([ids]), use_cache=False)
    return Capture.open(out)


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tensor=2), Layout(pipeline=2, expert=2)],
    ids=["one", "tp2", "pp2-ep2"],
)
def test_a_job_uses_the_routes_that_it_is_given(
    model: Path, tokens: list[list[int]], rollout: Capture, layout: Layout, tmp_path: Path
) -> None:
    own, given = str(tmp_path / "own"), str(rollout.directory)
    forward = {"do": "forward", "tokens": tokens}
    captures: dict[str, dict[str, Any]] = {
        "own": {},
        "own forced": {"routes": own},
        "own weights": {"routes": own, "route_weights": True},
        "forced": {"routes": given},
        "weights": {"routes": given, "route_weights": True},
    }
    steps = [
        {**forward, "capture": str(tmp_path / name), "points": "all", "vocab": VOCAB, **options}
        for name, options in captures.items()
    ]
    job = {"model": str(model), "steps": [forward, *steps, forward]}
    scores = run_job(job, layout)[0]
    plain, by_name = scores[0], dict(zip(captures, scores[1:], strict=False))
    assert plain == by_name["own"] == by_name["own forced"] == by_name["own weights"] == scores[-1]

    gap = {}
    for name in ("own", "forced", "weights"):
        capture = Capture.open(tmp_path / name)
        assert capture.finished and not capture.problems
        joined = join(rollout, capture)
        gap[name] = np.abs(joined.score_trainer - joined.score_rollout).mean()
    for layer in range(LAYERS):
        found = Routes.of(rollout, weights=True).look_up(layer, capture.keys)
        assert found.found.all() and found.weights is not None
        # Megatron has no order of slots
        order = np.argsort(found.ids, 1)
        ids, weights = (np.take_along_axis(a, order, 1) for a in (found.ids, found.weights))
        for name in ("forced", "weights"):
            forced = Capture.open(tmp_path / name).read(f"layers.{layer}.{IDS}")
            np.testing.assert_array_equal(forced, ids)
        np.testing.assert_array_equal(capture.read(f"layers.{layer}.{WEIGHTS}"), weights)
    # what is left is that of two sound engines
    assert gap["own"] > 2 * gap["forced"] > 10 * gap["weights"]


def test_a_job_says_which_rows_it_had_no_routes_for(
    model: Path, tokens: list[list[int]], rollout: Capture, tmp_path: Path
) -> None:
    # five rows with another prefix, and eight of padding
    changed = [*tokens[:2], tokens[2][:16], tokens[3][:19] + [0] * 5]
    step = {
        "do": "forward",
        "tokens": changed,
        "capture": str(tmp_path / "c"),
        "points": f"layers.*.{IDS}",
        "vocab": VOCAB,
        "routes": str(rollout.directory),
    }
    run_job({"model": str(model), "steps": [step]}, Layout(pipeline=2))
    capture = Capture.open(tmp_path / "c")
    assert len(capture.problems) == 2
    for stage, problem in enumerate(capture.problems):
        assert f"(pp {stage}): 13 of 96 rows kept their own routes" in problem
    routes = Routes.of(rollout).look_up(3, capture.keys)
    ids = capture.read(f"layers.3.{IDS}")
    assert (~routes.found).sum() == 13
    np.testing.assert_array_equal(ids[routes.found], np.sort(routes.ids[routes.found], 1))
