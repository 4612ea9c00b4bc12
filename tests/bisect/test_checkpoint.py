"""Checkpoint directories: layouts that must read alike, and broken ones that must be refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from layerbisect.bisect.checkpoint import Checkpoint, TensorCache
from layerbisect.bisect.model_config import ModelConfig
from layerbisect.bisect.precision import FULL, Precision
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.weights import expected_shapes
from layerbisect.captures.errors import ModelDirectoryError

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 60,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "attention_bias": True,
    "mlp_only_layers": [1],
}
TOKENS = torch.arange(20) * 7 % 60
LENGTHS = [12, 8]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])

Tensors = dict[str, torch.Tensor]


def random_tensors(dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(ModelConfig.from_dict(MOE), fused_experts=False)
    return {
        name: torch.randn(shape, generator=generator).mul(0.2).to(dtype)
        for name, shape in shapes.items()
    }


def write(directory: Path, *shards: Tensors, config: dict[str, Any] = MOE) -> Path:
    """Write a checkpoint directory; with several shards also the index."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        save_file(shard, directory / f"model-{index}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{index}.safetensors")
    index_path = directory / "model.safetensors.index.json"
    index_path.write_text(json.dumps({"weight_map": weight_map}))
    return directory


def scores(
    directory: Path,
    dtype: torch.dtype = torch.float64,
    precision: Precision = FULL,
    **options: Any,
) -> torch.Tensor:
    model = ReferenceModel.from_directory(directory, dtype, **options)
    x = model.embed(TOKENS, precision=precision)
    return model.tail(0, x, POSITIONS, LENGTHS, TOKENS.roll(-1), precision=precision)


@contextmanager
def refused(message: str) -> Iterator[None]:
    with pytest.raises(ModelDirectoryError, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


def test_shards_and_fused_experts_read_like_one_file(tmp_path: Path) -> None:
    tensors = random_tensors(torch.bfloat16)
    expected = scores(write(tmp_path / "one", tensors))
    names = sorted(tensors)
    thirds = [{name: tensors[name] for name in names[part::3]} for part in range(3)]
    assert torch.equal(scores(write(tmp_path / "sharded", *thirds)), expected)
    # without an index every safetensors file counts
    (tmp_path / "sharded" / "model.safetensors.index.json").unlink()
    assert torch.equal(scores(tmp_path / "sharded"), expected)

    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        fused[prefix + "gate_up_proj"] = torch.cat([gate, up], dim=1)
        fused[prefix + "down_proj"] = down
    assert torch.equal(scores(write(tmp_path / "fused", fused)), expected)


def test_float32_weights_round_as_an_engine_would(tmp_path: Path) -> None:
    wide = write(tmp_path / "wide", random_tensors(torch.float32))
    narrow = write(tmp_path / "narrow", random_tensors(torch.bfloat16))
    assert not torch.equal(scores(wide), scores(narrow))
    assert torch.equal(scores(wide, weight_dtype=torch.bfloat16), scores(narrow))
    # what rounds its results also holds its weights in that dtype
    rough = Precision.all_in(torch.bfloat16)
    assert torch.equal(scores(wide, torch.float32, rough), scores(narrow, torch.float32, rough))


def test_the_size_of_the_cache_changes_nothing(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", random_tensors(torch.bfloat16))
    assert torch.equal(scores(directory, cache_bytes=0), scores(directory))
    assert torch.equal(scores(directory, cache_bytes=20_000), scores(directory))


def test_tensors_by_name(tmp_path: Path) -> None:
    tensors = random_tensors(torch.bfloat16)
    model = ReferenceModel.from_directory(write(tmp_path / "model", tensors))
    assert model.tensor_names() == tuple(sorted(tensors))
    for name in tensors:
        assert torch.equal(model.tensor(name), tensors[name])
        assert model.tensor(name).dtype == torch.bfloat16
    with refused("holds no tensor model.layers.9.mlp.gate.weight"):
        model.tensor("model.layers.9.mlp.gate.weight")


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    tensors = random_tensors(torch.bfloat16)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    expected = scores(write(tmp_path / "untied", tensors))
    del tensors["lm_head.weight"]
    tied = {**MOE, "tie_word_embeddings": True}
    assert torch.equal(scores(write(tmp_path / "tied", tensors, config=tied)), expected)
    with refused("holds no tensor lm_head.weight"):
        ReferenceModel.from_directory(write(tmp_path / "headless", tensors))


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    with refused("no safetensors file in"):
        ReferenceModel.from_directory(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.2.self_attn.o_proj.bias",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.2.mlp.experts.3.down_proj.weight",
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors = random_tensors(torch.bfloat16)
    given = tensors.pop(name)
    with refused(f"holds no tensor {name}"):
        ReferenceModel.from_directory(write(tmp_path / "missing", tensors))
    tensors[name] = torch.zeros(5, *given.shape[1:])
    received, expected = ([*size, *given.shape[1:]] for size in ([5], given.shape[:1]))
    with pytest.raises(ModelDirectoryError) as caught:
        ReferenceModel.from_directory(write(tmp_path / "misshapen", tensors))
    assert f"{name} in " in str(caught.value)
    assert f"has shape {received}, but config.json expects {expected}" in str(caught.value)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors(torch.bfloat16)
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(32, 32, dtype=torch.int8)
    with refused("q_proj.weight in .* is I8, not one of BF16"):
        ReferenceModel.from_directory(write(tmp_path / "model", tensors))


@pytest.mark.parametrize("keep", [0, 4, 500, -1])
def test_a_truncated_file_is_refused(keep: int, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", random_tensors(torch.bfloat16))
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with refused("model.safetensors is not a whole safetensors file"):
        ReferenceModel.from_directory(directory)


def test_a_broken_index_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(torch.bfloat16)
    names = sorted(tensors)
    halves = [{name: tensors[name] for name in names[part::2]} for part in range(2)]
    directory = write(tmp_path / "model", *halves)
    index = directory / "model.safetensors.index.json"
    good = index.read_text()
    index.write_text(good.replace(f'"{names[0]}"', '"model.extra.weight"'))
    with refused("says that model-0.safetensors holds model.extra.weight, and it doesn't"):
        ReferenceModel.from_directory(directory)
    for broken in ("{", "{}"):
        index.write_text(broken)
        with refused("cannot read .*index.json"):
            ReferenceModel.from_directory(directory)
    index.write_text(good)
    (directory / "model-1.safetensors").unlink()
    with refused("model-1.safetensors is missing, though the index names it"):
        ReferenceModel.from_directory(directory)


def test_only_wide_compute_dtypes(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="float32 or float64, got torch.bfloat16"):
        ReferenceModel.from_directory(tmp_path, torch.bfloat16)


def test_checkpoint_maps_and_reads_only_what_is_asked(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", {"a": torch.arange(6.0), "b": torch.ones(2)})
    checkpoint = Checkpoint(directory)
    assert checkpoint.names() == ("a", "b")
    assert "a" in checkpoint and "c" not in checkpoint
    assert checkpoint.dtype("a") == torch.float32
    # two reads are views of one mapping, not copies
    first, second = checkpoint.tensor("a"), checkpoint.tensor("a")
    assert first.data_ptr() == second.data_ptr()


def test_cache_forgets_what_was_used_longest_ago() -> None:
    cache, made = TensorCache(max_bytes=80), []

    def get(key: str, elements: int = 10) -> None:
        def make() -> torch.Tensor:
            made.append(key)
            return torch.zeros(elements)

        assert cache.get(key, make).numel() == elements

    for key in ("a", "b", "a", "c", "a", "b", "c"):
        get(key)
    assert made == ["a", "b", "c", "b", "c"]
    get("too large", 21)
    get("too large", 21)
    get("b")
    assert made[5:] == ["too large", "too large"]
