"""Faults that drown in a layer's rounding, and stand out of one operator's over many rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from layerbisect.bisect.bundles import layer_bundles, open_side
from layerbisect.bisect.own_error import own_errors
from layerbisect.captures.store import Capture
from layerbisect.kernels.judging.own_error import OwnError
from layerbisect.kernels.replay.judge import Judge
from tests.bisect.making import Engine, random_tokens

CHANNEL = 17
TOKENS = random_tokens(512, [96] * 6, seed=3)

Planted = Callable[[Any], Iterator[None]]


@contextmanager
def o_proj_row(layer: Any) -> Iterator[None]:
    """One output channel of the output projection is 5 % too large."""
    weight = layer.self_attn.o_proj.weight.data
    before = weight.clone()
    weight[CHANNEL] = (weight[CHANNEL].float() * 1.05).to(weight.dtype)
    yield
    weight.copy_(before)


@contextmanager
def norm_eps(layer: Any) -> Iterator[None]:
    """The attention norm's eps is 1e-3 for 1e-6."""
    norm = layer.input_layernorm
    before, norm.variance_epsilon = norm.variance_epsilon, 1e-3
    yield
    norm.variance_epsilon = before


@contextmanager
def softmax_scale(layer: Any) -> Iterator[None]:
    """The softmax scale is 1 % too large."""
    layer.self_attn.scaling *= 1.01
    yield
    layer.self_attn.scaling /= 1.01


FAULTS: dict[str, tuple[Any, str, str, float]] = {
    "o_proj row": (o_proj_row, "attn.out", f"channel {CHANNEL} gain", 0.05),
    "norm eps": (norm_eps, "attn.norm", "eps", 1e-3),
    "softmax scale": (softmax_scale, "attn.context", "softmax scale", 0.01),
}


@pytest.fixture(scope="module")
def engine(small_moe_dir: Path) -> Engine:
    return Engine.load(small_moe_dir, "rollout")


@pytest.fixture(scope="module", params=FAULTS)
def fault(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_is_convicted_with_its_place_and_size(
    layer: int, fault: str, engine: Engine, small_moe_dir: Path, tmp_path: Path
) -> None:
    plant, suffix, name, size = FAULTS[fault]
    with plant(engine.model.model.layers[layer]):
        capture = engine.capture(tmp_path / "capture", TOKENS)
    convicted = [e for e in replayed(capture, small_moe_dir) if e.convicted]
    assert [e.point for e in convicted] == [f"layers.{layer}.{suffix}"]
    strongest = convicted[0].fits[0]
    assert strongest.name == name
    assert strongest.coefficient == pytest.approx(size, rel=0.3)


def test_is_below_the_rounding_of_the_layer(
    fault: str, engine: Engine, small_moe_dir: Path, tmp_path: Path
) -> None:
    plant = FAULTS[fault][0]
    points = ["layers.*.input", "layers.*.output"]
    with plant(engine.model.model.layers[1]):
        capture = engine.capture(tmp_path / "capture", TOKENS, points=points)
    model, side = open_side(Capture.open(capture), small_moe_dir)
    judged = own_errors(model, side, range(4))
    assert len(judged) == 4
    assert not [e.point for e in judged if e.far_off or e.nonfinite]


def replayed(capture: Path, model_directory: Path) -> list[OwnError]:
    model, side = open_side(Capture.open(capture), model_directory)
    found = []
    for layer in range(model.config.num_layers):
        bundles, _ = layer_bundles(model, side, layer)
        found += [Judge(b).judge(b.captured) for b in bundles]
    return found
