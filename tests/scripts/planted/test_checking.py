"""A form that does not what it says is found out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.planted import norms
from tests.scripts.planted.checking import Checked, Layout, check_truth

FAULT = replace(norms.FAULTS[0], point="attn.out", passes="both", layers="each", changes=0.9)
LAYER = 2


def projection(model: Any, layer: int) -> Any:
    """The projection that makes ``attn.out``."""
    return model.model.layers[layer].self_attn.o_proj


@contextmanager
def scaled(model: Any, layer: int) -> Iterator[None]:
    """Scale what a projection returns, and take it back."""
    hook = projection(model, layer).register_forward_hook(lambda _, args, out: out * 1.01)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def left_in_the_weights(model: Any, layer: int) -> Iterator[None]:
    with scaled(model, layer):
        yield
    projection(model, layer).weight.data *= 1 + 2**-10


@contextmanager
def left_in_a_module(model: Any, layer: int) -> Iterator[None]:
    with scaled(model, layer):
        yield
    # no weight shows it, and only calls of one token have it
    own = type(projection(model, layer)).forward
    module = projection(model, layer)
    module.forward = lambda x: own(module, x) * (1.01 if x.shape[1] == 1 else 1)


@contextmanager
def in_a_layer_before(model: Any, layer: int) -> Iterator[None]:
    with scaled(model, layer), scaled(model, layer - 1):
        yield


@contextmanager
def in_few_rows(model: Any, layer: int) -> Iterator[None]:
    def first_half(_: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[:, :24] * 1.01, out[:, 24:]], 1)

    hook = projection(model, layer).register_forward_hook(first_half)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def nothing(model: Any, layer: int) -> Iterator[None]:
    yield


def test_what_is_true_is_taken(llama: Checked, tmp_path: Path) -> None:
    fault = replace(FAULT, form=scaled)
    for seen in check_truth(llama, fault, LAYER, tmp_path).values():
        assert seen.changed.all()


@pytest.mark.parametrize(
    ("form", "sentence", "layout"),
    [
        (left_in_the_weights, r"leaves \['model.layers.2.*o_proj.weight', 'logits'\]", "single"),
        (left_in_a_module, r"leaves \['logits'\]", "batched decode"),
        (in_a_layer_before, "first shows at layers.1.attn.out", "single"),
        (in_few_rows, "changes 0.500 of layers.2.attn.out", "single"),
        (nothing, "changes nothing", "batched decode"),
    ],
)
def test_what_is_not_is_said(
    form: Any, sentence: str, layout: Layout, llama: Checked, tmp_path: Path
) -> None:
    module = projection(llama.model, LAYER)
    right = module.weight.detach().clone()
    try:
        with pytest.raises(AssertionError, match=sentence):
            check_truth(llama, replace(FAULT, form=form), LAYER, tmp_path, [layout])
    finally:
        module.weight.data.copy_(right)
        vars(module).pop("forward", None)
