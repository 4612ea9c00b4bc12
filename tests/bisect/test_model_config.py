"""config.json of transformers 4 and 5, and what the reference refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerbisect.bisect.model_config import ModelConfig
from layerbisect.captures.errors import ModelDirectoryError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def test_defaults_are_those_of_the_model_family() -> None:
    llama = ModelConfig.from_dict(LLAMA)
    assert (llama.head_dim, llama.kv_heads, llama.qk_norm, llama.tied) == (16, 4, False, False)
    assert (llama.rope_theta, llama.rope_scaling, llama.eps) == (10000.0, None, 1e-6)
    assert llama.moe_layers == ()
    qwen3 = ModelConfig.from_dict({**LLAMA, "model_type": "qwen3"})
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, True)
    moe = ModelConfig.from_dict(MOE)
    assert (moe.head_dim, moe.experts, moe.top_k, moe.renormalise) == (16, 8, 2, False)


def test_both_spellings_of_rope_and_experts() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    old = ModelConfig.from_dict(
        {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **llama3}}
    )
    new = ModelConfig.from_dict(
        {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **llama3}}
    )
    assert old == new
    assert new.rope_theta == 5e5
    assert new.rope_scaling == {"rope_type": "llama3", **llama3}
    renamed = {key: value for key, value in MOE.items() if key != "num_experts"}
    assert ModelConfig.from_dict({**renamed, "num_local_experts": 8}) == ModelConfig.from_dict(MOE)


def test_the_original_context_defaults_to_the_longest() -> None:
    config = ModelConfig.from_dict({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert config.rope_scaling is not None
    assert config.rope_scaling["original_max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, (0, 1, 2, 3)),
        ({"mlp_only_layers": [0, 2]}, (1, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": None}, (2,)),
    ],
)
def test_which_layers_are_sparse(changes: dict[str, Any], sparse: tuple[int, ...]) -> None:
    assert ModelConfig.from_dict({**MOE, **changes}).moe_layers == sparse


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("qwen3", {}, (None, None, None, None)),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 9)),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
        ("qwen3_moe", {"use_sliding_window": True}, (9, 9, 9, 9)),
        ("llama", {"use_sliding_window": True}, (None, None, None, None)),
    ],
)
def test_sliding_windows(
    model_type: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    raw = {**MOE, "model_type": model_type, "sliding_window": 9, **changes}
    assert ModelConfig.from_dict(raw).sliding_windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "has model_type 'mamba', but .* only llama, qwen3, qwen3_moe"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "has rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' without 'factor'"),
        ({"rope_scaling": "linear"}, "holds a value of the wrong kind"),
        ({"partial_rotary_factor": 0.5}, "has partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "has hidden_act 'gelu'"),
        ({"mlp_bias": True}, "has mlp_bias true"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised weights \('fp8'\)"),
        ({"hidden_size": "wide"}, "holds a value of the wrong kind"),
        ({"hidden_size": None}, "holds a value of the wrong kind"),
        ({"num_hidden_layers": 0}, "gives num_layers = 0, which must be positive"),
        ({"num_key_value_heads": 3}, "has 4 heads of 16 channels and 3 key heads"),
        ({"head_dim": 15}, "has 4 heads of 15 channels"),
        ({"num_experts_per_tok": 9}, "routes to 9 of 8 experts"),
        ({"num_experts_per_tok": 0}, "routes to 0 of 8 experts"),
    ],
)
def test_what_is_unsupported_is_refused_in_one_sentence(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelDirectoryError, match=message) as caught:
        ModelConfig.from_dict({**MOE, **changes})
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ModelDirectoryError, match="config.json lacks 'vocab_size'"):
        ModelConfig.from_dict({key: MOE[key] for key in MOE if key != "vocab_size"})


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ModelDirectoryError, match=f"no config.json in {directory};"):
            ModelConfig.from_directory(directory)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelDirectoryError, match=r"cannot read .*config.json"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelDirectoryError, match="must hold a JSON object, got list"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_directory(str(tmp_path)) == ModelConfig.from_dict(LLAMA)
