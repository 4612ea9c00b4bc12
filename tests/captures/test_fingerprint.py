"""A fingerprint tells weights apart, and is the same wherever they are held."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from layerbisect.captures.fingerprint import SAMPLE, fingerprint
from layerbisect.captures.transformers_adapter import Anatomy


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int64"])
def test_torch_and_numpy_agree(dtype: str) -> None:
    array = np.arange(3 * SAMPLE + 7).astype(dtype)
    assert fingerprint(array) == fingerprint(torch.from_numpy(array))
    assert fingerprint(array.reshape(1, -1)) != fingerprint(array)


def test_bfloat16_as_bits() -> None:
    tensor = torch.randn(64, 64).bfloat16()
    bits = tensor.view(torch.uint16).numpy()
    assert fingerprint(bits, "BF16") == fingerprint(tensor) != fingerprint(bits)
    assert fingerprint(tensor) != fingerprint(tensor.float())


def test_a_view_is_as_good_as_a_copy() -> None:
    stacked = torch.randn(4, 6, 5)
    assert fingerprint(stacked[2, :3]) == fingerprint(stacked[2, :3].clone())
    assert fingerprint(stacked.mT) == fingerprint(stacked.mT.contiguous())


@pytest.mark.parametrize("shape", [(), (0,), (1,), (SAMPLE,), (SAMPLE + 1,), (2, SAMPLE)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert len(fingerprint(torch.zeros(shape))) == 16
    assert fingerprint(torch.zeros(shape)) == fingerprint(np.zeros(shape, np.float32))


def test_one_sampled_element_changes_it() -> None:
    tensor = torch.zeros(100, 100)
    before = fingerprint(tensor)
    tensor[0, 0] = -0.0
    assert fingerprint(tensor) != before


@pytest.mark.parametrize("family", ["moe", "qwen3", "llama"])
def test_a_model_has_the_fingerprints_of_its_checkpoint(
    family: str, request: pytest.FixtureRequest
) -> None:
    directory: Path = request.getfixturevalue(f"small_{family}_dir")
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    on_disk: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        on_disk |= load_file(path)
    held = {name: fingerprint(t) for name, t in Anatomy.of(model).checkpoint_tensors()}
    assert held == {name: fingerprint(t) for name, t in on_disk.items()}
