"""What cannot be judged is refused, or named, in one clear sentence, with exit code 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import layerbisect
from layerbisect.bisect.gate import MIN_ROWS
from layerbisect.bisect.locate import bisect
from layerbisect.captures.errors import (
    CaptureError,
    LayerBisectError,
    ModelDirectoryError,
    TokenMismatchError,
)
from layerbisect.captures.points import parse
from layerbisect.captures.store import Capture
from layerbisect.captures.writer import CaptureWriter
from layerbisect.models import make_tiny
from tests.bisect.conftest import Clean
from tests.bisect.making import INFO, rewrite
from tests.conftest import SMALL

SIDES = ("rollout", "trainer")


def refused(clean: Clean, kind: type[LayerBisectError] | None = None, /, **given: Path) -> str:
    """Bisect with some inputs replaced, which must be refused, and return the sentence."""
    inputs = {"rollout": clean.rollout, "trainer": clean.trainer, "model": clean.model} | given
    with pytest.raises(kind or LayerBisectError) as caught:
        bisect(inputs["rollout"], inputs["trainer"], model=inputs["model"])
    return sentence(str(caught.value))


def unjudged(clean: Clean, **given: Path) -> str:
    """Bisect with some inputs replaced, which must be inconclusive, and return the reasons."""
    inputs = {"rollout": clean.rollout, "trainer": clean.trainer, "model": clean.model} | given
    verdict = bisect(inputs["rollout"], inputs["trainer"], model=inputs["model"])
    assert verdict.status == "inconclusive" and verdict.exit_code == 2 and not verdict
    assert verdict.culprits == ()
    json.dumps(verdict.to_json(), allow_nan=False)
    reason, *settings = verdict.reasons
    assert all(", and the model directory has " in said for said in settings)
    assert verdict.next
    return "\n".join(map(sentence, (reason, *settings)))


def sentence(text: str) -> str:
    assert (
        "\n" not in text and "Traceback" not in text and "nan nat" not in text and len(text) < 400
    )
    return text


def either(clean: Clean, side: str, tmp_path: Path, **changes: Any) -> dict[str, Path]:
    """One side rewritten with changes."""
    return {side: rewrite(getattr(clean, side), tmp_path / "changed", **changes)}


# --- rows


@pytest.mark.parametrize("side", SIDES)
def test_different_tokens(clean: Clean, side: str, tmp_path: Path) -> None:
    def other(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        # the 11th token of the second sequence, wherever it is written
        return np.where(tokens == clean.tokens[1][10], 511, tokens)

    given = either(clean, side, tmp_path, tokens=other)
    places = [s.index(clean.tokens[1][10]) for s in clean.tokens if clean.tokens[1][10] in s]
    said = refused(clean, TokenMismatchError, **given)
    assert f"position {min(places)}: " in said
    ours, theirs = (511, clean.tokens[1][10]) if side == "rollout" else (clean.tokens[1][10], 511)
    assert f"rollout has {ours} " in said and f"trainer has {theirs} " in said


def test_no_common_rows(clean: Clean, tmp_path: Path) -> None:
    model, given = clean.engines["rollout"].model, {"label": "rollout", "salts": ["adapter"]}
    with layerbisect.capture(model, tmp_path / "salted", **given), torch.no_grad():  # type: ignore[arg-type]
        model(input_ids=torch.tensor([clean.tokens[0]]), use_cache=False)
    assert "have no row in common: 48 and 144 rows" in refused(clean, rollout=tmp_path / "salted")


def test_too_few_rows(clean: Clean, tmp_path: Path) -> None:
    rows = np.zeros(144, bool)
    rows[: MIN_ROWS - 1] = True
    said = unjudged(clean, rollout=rewrite(clean.rollout, tmp_path / "few", rows=rows))
    assert said.startswith(f"only {MIN_ROWS - 1} rows are in both captures")


def test_rows_without_their_beginning(clean: Clean, tmp_path: Path) -> None:
    # the tokens are known from the scores, and the first rows were not computed
    old = Capture.open(clean.rollout)
    later = old.rows.position >= 5
    path = rewrite(clean.rollout, tmp_path / "cached", rows=later, context=True)
    said = unjudged(clean, rollout=path)
    assert "only 0 of the 129 rows" in said and "flush the prefix cache" in said


def test_an_empty_capture(clean: Clean, tmp_path: Path) -> None:
    CaptureWriter(tmp_path / "empty", INFO).finish()
    assert "is an empty capture" in refused(clean, CaptureError, rollout=tmp_path / "empty")
    assert "holds no capture" in refused(clean, CaptureError, trainer=tmp_path)


def test_one_label_for_both(clean: Clean) -> None:
    assert "both captures are labelled 'rollout'" in refused(clean, trainer=clean.rollout)


def test_the_same_capture_under_two_labels_agrees(clean: Clean) -> None:
    verdict = layerbisect.bisect(
        clean.rollout, Capture.open(clean.rollout, label="again"), model=clean.model
    )
    assert verdict.status == "agree" and verdict.gap is not None and verdict.gap.max == 0
    assert all(d.bitwise_equal == 1 for d in verdict.differences)


# --- points


@pytest.mark.parametrize("side", SIDES)
def test_a_missing_layer_boundary(clean: Clean, side: str, tmp_path: Path) -> None:
    wanted = Capture.open(clean.rollout).info.points
    given = either(
        clean,
        side,
        tmp_path,
        points=lambda name: name != "layers.2.input",
        info={"points": wanted},
    )
    said = unjudged(clean, **given)
    assert said.startswith(f"{side} was to hold layers.2.input and does not; see `layerbisect show")


def test_an_inner_point_that_is_missing_costs_itself_alone(clean: Clean, tmp_path: Path) -> None:
    wanted = Capture.open(clean.rollout).info.points
    given = either(
        clean,
        "rollout",
        tmp_path,
        points=lambda name: name != "layers.2.attn.out",
        info={"points": wanted},
    )
    verdict = bisect(given["rollout"], clean.trainer, model=clean.model)
    assert verdict.status == "agree" and verdict.culprits == ()
    assert verdict.coverage.points.missing == ("rollout: layers.2.attn.out",)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("point", ["layers.1.input", "layers.2.attn.out", "final_norm"])
def test_a_value_that_is_not_finite(
    clean: Clean, point: str, side: str, value: float, tmp_path: Path
) -> None:
    def spoil(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if name == point:
            values[7, 3] = value
        return values

    said = unjudged(clean, **either(clean, side, tmp_path, change=spoil))
    assert said.startswith(f"{point} holds NaN or infinity in 1 rows of {side}, and is the first")


def test_an_inner_point_of_one_side_alone_that_is_not_finite(clean: Clean, tmp_path: Path) -> None:
    def spoil(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if name == "layers.2.attn.context":
            values[7:9] = np.nan
        return values

    rollout = rewrite(clean.rollout, tmp_path / "nan", change=spoil)
    coarse = rewrite(
        clean.trainer,
        tmp_path / "coarse",
        points=lambda name: name.endswith((".input", ".output", "final_norm")),
    )
    said = unjudged(clean, rollout=rollout, trainer=coarse)
    assert said.startswith("layers.2.attn.context holds NaN or infinity in 2 rows of rollout")


def test_the_first_point_in_the_order_of_computation_is_named(clean: Clean, tmp_path: Path) -> None:
    def spoil(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if name in ("layers.3.input", "layers.2.mlp.out", "layers.3.attn.q"):
            values[20:] = np.inf
        return values

    made = [rewrite(getattr(clean, s), tmp_path / s, change=spoil) for s in SIDES]
    said = unjudged(clean, rollout=made[0], trainer=made[1])
    assert "layers.2.mlp.out holds NaN or infinity in 124 rows of rollout and 124 rows" in said


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_log_probs_that_are_not_finite(clean: Clean, value: float, tmp_path: Path) -> None:
    def filtered(logprob: NDArray[np.float64]) -> NDArray[np.float64]:
        logprob[::10] = value
        return logprob

    said = unjudged(clean, **either(clean, "rollout", tmp_path, logprobs=filtered))
    assert said.startswith("15 of 141 pairs of log-probs are not finite")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("point", "module", "operator"),
    [
        ("layers.2.attn.out", "layers.2.self_attn.o_proj", "linear"),
        ("layers.1.mlp.norm", "layers.1.post_attention_layernorm", "norm"),
        ("embed", "embed_tokens", "embedding"),
        ("final_norm", "norm", "norm"),
    ],
)
def test_what_computes_nan_of_finite_input_is_convicted(
    clean: Clean, point: str, module: str, operator: str, side: str, tmp_path: Path
) -> None:
    engine = clean.engines[side]

    def spoil(module: Any, args: Any, out: Any) -> Any:
        out[:, 7, 3] = np.nan
        return out

    handle = engine.model.model.get_submodule(module).register_forward_hook(spoil, prepend=True)
    made = {"rollout": clean.rollout, "trainer": clean.trainer}
    made[side] = engine.capture(tmp_path / "nan", clean.tokens)
    handle.remove()
    verdict = bisect(made["rollout"], made["trainer"], model=clean.model)
    layer = parse(point).layer
    assert [(c.layer, c.operator, c.side) for c in verdict.culprits] == [(layer, operator, side)]
    assert verdict.status == "divergent" and "the first at position 7" in verdict.culprits[0].where


def test_nan_in_neighbouring_points_that_ends_there_is_damage(clean: Clean, tmp_path: Path) -> None:
    def spoil(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if name in ("layers.1.attn.out", "layers.1.mid"):
            values[7] = np.nan
        return values

    said = unjudged(clean, **either(clean, "rollout", tmp_path, change=spoil))
    assert said.startswith("layers.1.attn.out holds NaN or infinity in 1 rows of rollout")


def test_no_point_in_common(clean: Clean, tmp_path: Path) -> None:
    made = {
        "rollout": rewrite(clean.rollout, tmp_path / "q", points=lambda n: n.endswith("attn.q")),
        "trainer": rewrite(clean.trainer, tmp_path / "k", points=lambda n: n.endswith("attn.k")),
    }
    assert unjudged(clean, **made).startswith("the captures have no point in common")


def test_neither_log_probs_nor_boundaries(clean: Clean, tmp_path: Path) -> None:
    made = {
        side: rewrite(
            getattr(clean, side),
            tmp_path / side,
            points=lambda name: name.endswith("attn.v"),
            logprobs=None,
        )
        for side in SIDES
    }
    assert "no gap to explain" in unjudged(clean, **made)


def test_expert_numbers_that_are_none(clean: Clean, tmp_path: Path) -> None:
    def wild(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if name == "layers.1.mlp.expert_ids":
            values[5:25, 0] = 99
        return values

    given = either(clean, "trainer", tmp_path, change=wild)
    verdict = bisect(clean.rollout, given["trainer"], model=clean.model)
    (culprit,) = verdict.culprits
    assert (culprit.layer, culprit.operator, culprit.side) == (1, "router", "trainer")
    assert culprit.point == "layers.1.mlp.expert_ids"


# --- models


def test_another_hidden_size(clean: Clean, tmp_path: Path) -> None:
    def narrow(name: str, values: NDArray[Any]) -> NDArray[Any]:
        return values[:, :100] if values.shape[1:] == (128,) else values

    made = either(clean, "rollout", tmp_path, change=narrow, info={"model_config": {}})
    said = refused(clean, **made)
    assert "has shape [100]" in said and "[128]" in said
    both = rewrite(clean.trainer, tmp_path / "both", change=narrow, info={"model_config": {}})
    said = refused(clean, ModelDirectoryError, rollout=made["rollout"], trainer=both)
    assert "has shape [100]" in said and "makes it [128]" in said


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", 64), ("num_attention_heads", 8), ("vocab_size", 99)]
)
def test_configurations_that_differ(clean: Clean, key: str, value: int, tmp_path: Path) -> None:
    config = dict(Capture.open(clean.rollout).info.model_config) | {key: value}
    said = refused(clean, **either(clean, "rollout", tmp_path, info={"model_config": config}))
    assert f"different models: {key} is {value} in " in said


def test_a_different_number_of_layers(clean: Clean, tmp_path: Path) -> None:
    said = refused(clean, **either(clean, "rollout", tmp_path, info={"num_layers": 6}))
    assert "num_hidden_layers is 6 in" in said


def test_a_dtype_that_the_reference_does_not_know(clean: Clean, tmp_path: Path) -> None:
    path = shutil.copytree(clean.rollout, tmp_path / "eight")
    info = json.loads((path / "capture.json").read_text())
    (path / "capture.json").write_text(json.dumps(info | {"dtype": "float8_e4m3fn"}))
    said = refused(clean, rollout=path)
    assert "was computed in float8_e4m3fn, and the reference knows only bfloat16" in said


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (dict(layers=3), "num_hidden_layers is 3"),
        (dict(hidden=64), "hidden_size is 64"),
        (dict(heads=2), "num_attention_heads is 2"),
        (dict(experts=4), "is 4 in"),
        (dict(top_k=3), "a row of layers.0.mlp.expert_weights has shape [2]"),
        (dict(vocab=256), "vocab_size is 256"),
    ],
)
def test_a_model_directory_of_another_shape(
    clean: Clean, sizes: dict[str, int], said: str, tmp_path: Path
) -> None:
    other = make_tiny(tmp_path / "other", **(SMALL | sizes))
    error = refused(clean, ModelDirectoryError, model=other)
    assert "the model directory does not fit" in error and said in error


def test_a_dense_model_directory(clean: Clean, small_qwen3_dir: Path) -> None:
    refused(clean, ModelDirectoryError, model=small_qwen3_dir)


def test_no_model_directory(clean: Clean, tmp_path: Path) -> None:
    assert "no config.json" in refused(clean, ModelDirectoryError, model=tmp_path)


def test_other_weights_accuse_nobody(clean: Clean, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", seed=1, **SMALL)
    said = unjudged(clean, model=other)
    assert "does not hold the weights or the settings that both sides ran" in said
    assert "of its tensors, such as" in said


def test_other_weights_without_fingerprints(clean: Clean, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", seed=1, **SMALL)
    made = {
        side: rewrite(getattr(clean, side), tmp_path / side, info={"fingerprints": {}})
        for side in SIDES
    }
    said = unjudged(clean, model=other, **made)
    assert "both differ from it in the same way in" in said


def _settings(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: config | changes


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_settings(rms_norm_eps=1e-2), "rms_norm_eps"),
        (
            _settings(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
            "rope_theta",
        ),
        (_settings(norm_topk_prob=False), "norm_topk_prob"),
        (_settings(tie_word_embeddings=True), "tie_word_embeddings"),
    ],
    ids=["eps", "rope", "top-k", "tied"],
)
def test_other_settings_accuse_nobody(
    clean: Clean, change: Callable[[dict[str, Any]], dict[str, Any]], name: str, tmp_path: Path
) -> None:
    other = shutil.copytree(clean.model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(change(config)))
    said, setting = unjudged(clean, model=other).splitlines()
    assert "does not hold the weights or the settings" in said
    assert setting.startswith(f"both sides ran with {name} ")


# --- what is seen less well is still judged


COARSE = (".input", ".output", "final_norm")


def test_a_coarse_capture_names_the_layer_and_says_what_to_capture(
    clean: Clean, tmp_path: Path
) -> None:
    engine = clean.engines["rollout"]
    faulty = engine.capture(
        tmp_path / "faulty", clean.tokens, points="coarse", faults=[("softmax-scale", 2)]
    )
    coarse = rewrite(clean.trainer, tmp_path / "coarse", points=lambda n: n.endswith(COARSE))
    verdict = bisect(faulty, coarse, model=clean.model)
    (culprit,) = verdict.culprits
    assert (culprit.layer, culprit.operator, culprit.side) == (2, None, "rollout")
    assert "attention" in culprit.evidence[-1]
    assert "points layers.2,logprob, then" in verdict.next
    # and that is enough
    points = ["layers.2", "logprob"]
    fine = [
        clean.engines["rollout"].capture(
            tmp_path / "fine", clean.tokens, points=points, faults=[("softmax-scale", 2)]
        ),
        clean.engines["trainer"].capture(tmp_path / "fine-2", clean.tokens, points=points),
    ]
    verdict = bisect(*fine, model=clean.model)
    (culprit,) = verdict.culprits
    assert (culprit.layer, culprit.operator, culprit.side) == (2, "attention", "rollout")


def test_a_coarse_capture_of_nothing_wrong_agrees(clean: Clean, tmp_path: Path) -> None:
    made = [
        rewrite(getattr(clean, side), tmp_path / side, points=lambda n: n.endswith(COARSE))
        for side in SIDES
    ]
    verdict = bisect(*made, model=clean.model)
    assert verdict.status == "agree", verdict.reasons


def test_without_log_probs_the_gap_is_read_out(clean: Clean, tmp_path: Path) -> None:
    made = [rewrite(getattr(clean, side), tmp_path / side, logprobs=None) for side in SIDES]
    verdict = bisect(*made, model=clean.model)
    assert verdict.status == "agree" and verdict.gap is not None
    assert verdict.gap.source == "read-out" and verdict.gap.rows == 141
    assert any("no log-prob is in both captures" in note for note in verdict.coverage.notes)
