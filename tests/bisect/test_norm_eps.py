"""A side whose norms have another eps: the norms are named, and what its configuration says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.fault_attention import rotated
from tests.bisect.conftest import Clean
from tests.bisect.making import Engine

Q, K = "self_attn.q_norm", "self_attn.k_norm"


def configured(model: Path, directory: Path, **settings: Any) -> Path:
    """Copy a model directory, with other settings in its config.json."""
    shutil.copytree(model, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return directory


def against_trainer(clean: Clean, folder: Path, **settings: Any) -> Verdict:
    """Judge a rollout whose config.json has other settings, on the same weights."""
    engine = Engine.load(configured(clean.model, folder / "model", **settings), "rollout")
    made = engine.capture(folder / "rollout", clean.tokens)
    return bisect(made, clean.trainer, model=clean.model)


@pytest.mark.parametrize("eps", [1e-2, 1e-3])
def test_an_eps_of_all_norms(clean: Clean, eps: float, tmp_path: Path) -> None:
    verdict = against_trainer(clean, tmp_path, rms_norm_eps=eps)
    assert verdict.status == "divergent"
    assert {(c.operator, c.side) for c in verdict.culprits} == {("norm", "rollout")}
    assert verdict.reasons[1:] == (
        f"rollout ran with rms_norm_eps {eps}, and the model directory has 1e-06",
    )
    fact = {label: facts["config rms_norm_eps"] for label, facts in verdict.environments.items()}
    assert fact == {"rollout": str(eps), "trainer": "1e-06"}


@contextmanager
def other_eps(model: Any, eps: float, names: tuple[str, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in model.model.layers:
            for name in names:
                norm = layer.get_submodule(name)
                stack.callback(setattr, norm, "variance_epsilon", norm.variance_epsilon)
                norm.variance_epsilon = eps
        yield


@contextmanager
def rotation_scaled(model: Any, by: float) -> Iterator[None]:
    def rotate(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        return own(q, k, by * cos, by * sin)

    with ExitStack() as stack:
        for layer in range(len(model.model.layers)):
            stack.enter_context(rotated(model, layer, rotate))
        yield


@pytest.mark.parametrize("eps", [3e-3, 1e-2, 3e-2])
def test_an_eps_of_the_qk_norms_alone(clean: Clean, eps: float, tmp_path: Path) -> None:
    engine = clean.engines["rollout"]
    with other_eps(engine.model, eps, (Q, K)):
        wrong = engine.capture(tmp_path / "wrong", clean.tokens)
    verdict = bisect(wrong, clean.trainer, model=clean.model)
    assert {c.operator for c in verdict.culprits} == {"norm"}
    # nothing in the configuration says so
    assert len(verdict.reasons) == 1


@pytest.mark.parametrize("by", [0.98, 0.995, 1.01])
def test_a_rotation_scaled_by_as_little(clean: Clean, by: float, tmp_path: Path) -> None:
    engine = clean.engines["rollout"]
    with rotation_scaled(engine.model, by):
        wrong = engine.capture(tmp_path / "wrong", clean.tokens)
    verdict = bisect(wrong, clean.trainer, model=clean.model)
    assert {(c.operator, c.side) for c in verdict.culprits} == {("rope", "rollout")}


def test_both_at_once(clean: Clean, tmp_path: Path) -> None:
    engine = clean.engines["rollout"]
    names = ("input_layernorm", "post_attention_layernorm")
    with other_eps(engine.model, 1e-2, names), rotation_scaled(engine.model, 0.98):
        wrong = engine.capture(tmp_path / "wrong", clean.tokens)
    verdict = bisect(wrong, clean.trainer, model=clean.model)
    assert {c.operator for c in verdict.culprits} == {"norm", "rope"}


def test_what_cannot_be_told_is_left_open(clean: Clean, tmp_path: Path) -> None:
    engine = clean.engines["rollout"]
    with other_eps(engine.model, 2e-3, (Q, K)):
        wrong = engine.capture(tmp_path / "wrong", clean.tokens)
    verdict = bisect(wrong, clean.trainer, model=clean.model)
    assert {c.operator for c in verdict.culprits} == {None, "norm"}
    (left_open,) = (c for c in verdict.culprits if c.operator is None)
    assert left_open.evidence[-1].endswith("it may be any of norm, rope")
    assert verdict.culprits[0] is left_open
    assert verdict.next == f"look at what makes {left_open.point} in the code of the rollout side"


def test_few_rows_are_enough(clean: Clean, tmp_path: Path) -> None:
    engine, tokens = clean.engines["rollout"], [clean.tokens[0][:17]]
    trainer = clean.engines["trainer"].capture(tmp_path / "trainer", tokens)
    with other_eps(engine.model, 1e-2, (Q, K)):
        wrong = engine.capture(tmp_path / "wrong", tokens)
    verdict = bisect(wrong, trainer, model=clean.model)
    assert {c.operator for c in verdict.culprits} == {"norm"}


def test_without_a_norm_of_queries_and_keys(clean_llama: Clean, tmp_path: Path) -> None:
    engine = clean_llama.engines["rollout"]
    with rotation_scaled(engine.model, 0.995):
        wrong = engine.capture(tmp_path / "wrong", clean_llama.tokens)
    verdict = bisect(wrong, clean_llama.trainer, model=clean_llama.model)
    assert {c.operator for c in verdict.culprits} == {"rope"}
