"""Wrong queries and keys: rotation, norm and projection are told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from layerbisect.bisect.locate import bisect
from layerbisect.fault_attention import rotated
from layerbisect.fault_tools import forward_replaced
from tests.bisect.conftest import Clean

LAYER = 1


def scaled(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
    return own(q, k, 0.9 * cos, 0.9 * sin)


def in_neighbours(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
    half = cos.shape[-1] // 2

    def turned(x: Any) -> Any:
        c, s = cos[:, None, :, :half], sin[:, None, :, :half]
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)

    return turned(q), turned(k)


@contextmanager
def norm_after_rotation(model: Any, layer: int) -> Iterator[None]:
    attention = model.model.layers[layer].self_attn
    q_norm, k_norm = attention.q_norm.forward, attention.k_norm.forward

    def rotate(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        q, k = own(q, k, cos, sin)
        return q_norm(q), k_norm(k)

    def skip(own: Any, x: Any) -> Any:
        return x

    with (
        rotated(model, layer, rotate),
        forward_replaced(attention.q_norm, skip),
        forward_replaced(attention.k_norm, skip),
    ):
        yield


def keys_scaled(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
    q, k = own(q, k, cos, sin)
    return q, 0.9 * k


FORMS: dict[str, tuple[Callable[[Any], AbstractContextManager[None]], str]] = {
    "scaled": (lambda model: rotated(model, LAYER, scaled), "rope"),
    "in neighbours": (lambda model: rotated(model, LAYER, in_neighbours), "rope"),
    "normed after": (lambda model: norm_after_rotation(model, LAYER), "norm"),
    "keys alone scaled": (lambda model: rotated(model, LAYER, keys_scaled), "norm"),
}


@pytest.mark.parametrize("side", ["rollout", "trainer"])
@pytest.mark.parametrize("name", FORMS)
def test_the_operator_is_named(clean: Clean, name: str, side: str, tmp_path: Path) -> None:
    form, operator = FORMS[name]
    engine = clean.engines[side]
    with form(engine.model):
        wrong = engine.capture(tmp_path / "wrong", clean.tokens)
    made = {"rollout": clean.rollout, "trainer": clean.trainer, side: wrong}
    verdict = bisect(made["rollout"], made["trainer"], model=clean.model)
    said = [(c.layer, c.operator, c.side) for c in verdict.culprits]
    assert said == [(LAYER, operator, side)], verdict.culprits


@pytest.mark.parametrize("name", ["scaled", "in neighbours"])
def test_without_norms_too(clean_llama: Clean, name: str, tmp_path: Path) -> None:
    form, operator = FORMS[name]
    engine = clean_llama.engines["rollout"]
    with form(engine.model):
        wrong = engine.capture(tmp_path / "wrong", clean_llama.tokens)
    verdict = bisect(wrong, clean_llama.trainer, model=clean_llama.model)
    assert [(c.layer, c.operator) for c in verdict.culprits] == [(LAYER, operator)]
