"""Settings that differ between the sides' configurations, or from the model directory's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from layerbisect.bisect.config_differences import settings_of, told_apart
from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from tests.bisect.conftest import Clean
from tests.bisect.making import Engine, rewrite


def recorded(
    clean: Clean, folder: Path, rollout: dict[str, Any], trainer: dict[str, Any]
) -> Verdict:
    """Judge clean captures that recorded other settings than they ran with."""
    made = []
    for label, settings in (("rollout", rollout), ("trainer", trainer)):
        source = getattr(clean, label)
        config = dict(Capture.open(source).info.model_config) | settings
        made.append(rewrite(source, folder / label, info={"model_config": config}))
    return bisect(*made, model=clean.model)


@pytest.mark.parametrize(
    ("rollout", "trainer", "said"),
    [
        (
            {"rms_norm_eps": 1e-5},
            {},
            "rollout ran with rms_norm_eps 1e-05, and the model directory has 1e-06",
        ),
        (
            {},
            {"norm_topk_prob": False},
            "trainer ran with norm_topk_prob false, and the model directory has true",
        ),
        (
            {"rms_norm_eps": 1e-5},
            {"rms_norm_eps": 1e-5},
            "both sides ran with rms_norm_eps 1e-05, and the model directory has 1e-06",
        ),
        (
            {"rms_norm_eps": 1e-5},
            {"rms_norm_eps": 1e-4},
            "rollout ran with rms_norm_eps 1e-05, trainer with 0.0001, "
            "and the model directory has 1e-06",
        ),
        (
            {"partial_rotary_factor": 0.5},
            {"partial_rotary_factor": 0.25},
            "rollout ran with partial_rotary_factor 0.5, trainer with 0.25",
        ),
    ],
)
def test_it_is_said_and_accuses_nobody(
    clean: Clean, rollout: dict[str, Any], trainer: dict[str, Any], said: str, tmp_path: Path
) -> None:
    verdict = recorded(clean, tmp_path, rollout, trainer)
    assert verdict.status == "agree" and not verdict.culprits
    assert verdict.reasons[1:] == (said,)


def test_what_is_the_same_is_not_said(clean: Clean, tmp_path: Path) -> None:
    verdict = recorded(clean, tmp_path, {}, {})
    assert len(verdict.reasons) == 1
    assert not [n for facts in verdict.environments.values() for n in facts if "config" in n]


def test_a_capture_that_recorded_sizes_alone(clean: Clean, tmp_path: Path) -> None:
    sizes = ("hidden_size", "num_hidden_layers", "num_experts")
    config = Capture.open(clean.trainer).info.model_config
    kept = {name: config[name] for name in sizes if name in config}
    made = rewrite(clean.trainer, tmp_path / "trainer", info={"model_config": kept})
    assert len(bisect(clean.rollout, made, model=clean.model).reasons) == 1


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (
            {"rope_theta": 1e6, "rope_scaling": None},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        ),
        ({"rope_theta": 1000000}, {"rope_parameters": {"rope_theta": 1e6}}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "beta_fast": 32, **YARN}},
        ),
        (
            {"use_sliding_window": False, "sliding_window": 4096},
            {"use_sliding_window": False, "sliding_window": None},
        ),
        ({"head_dim": None}, {"head_dim": 128}),
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 9.999999747378752e-06}),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, {"rope_theta": 1e4}),
        ({}, {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}}),
    ],
)
def test_two_spellings_of_one_setting(older: dict[str, Any], newer: dict[str, Any]) -> None:
    assert told_apart(older, newer, ("one", "the other")) == ""
    assert told_apart(newer, older, ("one", "the other")) == ""


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            {"rope_theta": 1e4},
            {"rope_parameters": {"rope_theta": 1e6}},
            "; rope_theta is 10000 in one and 1e+06 in the other",
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": None},
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
            "; rope_type is default in one and yarn in the other",
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
            "; rope_scaling factor is 2 in one and 4 in the other",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 4096},
            {"use_sliding_window": False, "sliding_window": 4096},
            "; sliding_window is 4096 in one and unused in the other",
        ),
        (
            {"attention_bias": True},
            {"attention_bias": False},
            "; attention_bias is true in one and false in the other",
        ),
    ],
)
def test_settings_that_differ(first: dict[str, Any], second: dict[str, Any], said: str) -> None:
    assert told_apart(first, second, ("one", "the other")) == said


def test_values_of_no_plain_kind_are_left_out() -> None:
    assert settings_of({"rms_norm_eps": [1e-6], "head_dim": {}, "hidden_act": "silu"}) == {
        "hidden_act": "silu"
    }


def test_a_refusal_names_the_setting(clean: Clean, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(clean.model, model)
    config = json.loads((model / "config.json").read_text())
    chosen = config["num_experts_per_tok"]
    (model / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": chosen + 1}))
    made = Engine.load(model, "rollout").capture(tmp_path / "rollout", clean.tokens)
    with pytest.raises(LayerBisectError) as refused:
        bisect(made, clean.trainer, model=clean.model)
    assert str(refused.value).startswith("the captures are of different models: a row of ")
    assert str(refused.value).endswith(
        f"; num_experts_per_tok is {chosen + 1} in rollout's configuration and {chosen} in "
        "trainer's"
    )
    with pytest.raises(LayerBisectError) as refused:
        bisect(clean.rollout, clean.trainer, model=model)
    assert (
        f"; num_experts_per_tok is {chosen} in rollout's configuration and {chosen + 1} in the "
        "directory's; give the checkpoint"
    ) in str(refused.value)
