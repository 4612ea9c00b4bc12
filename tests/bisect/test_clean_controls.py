"""Nothing is wrong, and nobody is accused: dtypes, layouts and models that differ by rounding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.models import make_tiny
from tests.bisect.conftest import Clean
from tests.bisect.making import Engine, random_tokens, rewrite
from tests.conftest import SMALL

FAMILIES = ("qwen3_moe", "qwen3", "llama")
DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ("padded", "packed", "decode", "batched decode", "chunked prefill")
TOKENS = random_tokens(512, [48, 40, 33])


@cache
def _engine(model: Path, label: str, dtype: str) -> Engine:
    attention, experts = {"rollout": ("eager", "eager"), "trainer": ("sdpa", "grouped_mm")}[label]
    return Engine.load(model, label, dtype=dtype, attention=attention, experts=experts)


@pytest.fixture(scope="session")
def wide_moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Qwen3-MoE with weights in float32, which an engine may round on loading."""
    return make_tiny(tmp_path_factory.mktemp("models") / "wide", dtype="float32", **SMALL)


def check(model: Path, rollout: Path, trainer: Path) -> Verdict:
    verdict = bisect(rollout, trainer, model=model)
    assert verdict.culprits == (), verdict.culprits
    assert verdict.status == "agree" and verdict.exit_code == 0, verdict.reasons
    return verdict


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_engines_in_one_dtype(
    family: str, dtype: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    fixture = "small_moe_dir" if family == "qwen3_moe" else f"small_{family}_dir"
    model = request.getfixturevalue(fixture)
    made = [
        _engine(model, label, dtype).capture(tmp_path / label, TOKENS)
        for label in ("rollout", "trainer")
    ]
    budget = check(model, *made).rounding_budget
    assert budget is not None
    assert budget.quadrature == pytest.approx(budget.whole, rel=0.3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_against_whole_sequences(clean: Clean, layout: str, tmp_path: Path) -> None:
    made = clean.engines["rollout"].capture(tmp_path / "rollout", clean.tokens, layout=layout)
    check(clean.model, made, clean.trainer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_against_itself(clean_llama: Clean, layout: str, tmp_path: Path) -> None:
    engine = clean_llama.engines["trainer"]
    made = Engine(engine.model, "rollout").capture(
        tmp_path / "rollout", clean_llama.tokens, layout=layout
    )
    check(clean_llama.model, made, clean_llama.trainer)


@pytest.mark.parametrize("wide", [False, True], ids=["bfloat16 weights", "float32 weights"])
@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_two_dtypes(
    narrow: str, wide: bool, small_moe_dir: Path, wide_moe_dir: Path, tmp_path: Path
) -> None:
    model = wide_moe_dir if wide else small_moe_dir
    made = [
        _engine(model, label, dtype).capture(tmp_path / label, TOKENS)
        for label, dtype in (("rollout", narrow), ("trainer", "float32"))
    ]
    check(model, *made)


def test_float32_weights_that_both_round(wide_moe_dir: Path, tmp_path: Path) -> None:
    made = [
        _engine(wide_moe_dir, label, "bfloat16").capture(tmp_path / label, TOKENS)
        for label in ("rollout", "trainer")
    ]
    check(wide_moe_dir, *made)


def test_few_tokens_accuse_nobody(clean: Clean, tmp_path: Path) -> None:
    # the gap of a few tokens varies, and is not beyond rounding for that
    for seed in range(6):
        tokens = random_tokens(512, [17], seed)
        made = {
            label: engine.capture(tmp_path / f"{label}-{seed}", tokens)
            for label, engine in clean.engines.items()
        }
        check(clean.model, made["rollout"], made["trainer"])


def _coarse_with_routes(name: str) -> bool:
    ends = (".input", ".output", ".expert_ids", ".expert_weights")
    return name in ("embed", "final_norm", "logprob") or name.endswith(ends)


def _narrow_pair(folder: Path, seed: int) -> tuple[Path, Path, Path]:
    """Make a model, and captures by both engines of what forced routes need and no more."""
    model = make_tiny(
        folder / "model", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2,
        vocab=512, seed=seed,
    )  # fmt: skip
    tokens = random_tokens(512, [64] * 4, seed)
    made = []
    for label in ("rollout", "trainer"):
        whole = _engine(model, label, "bfloat16").capture(folder / f"{label}-all", tokens)
        made.append(rewrite(whole, folder / label, points=_coarse_with_routes))
    return model, made[0], made[1]


# of each of these pairs one draw of rounding understates the noise in three rows or more
@pytest.mark.parametrize("seed", [10, 12, 17])
def test_two_weights_that_add_up_to_one(seed: int, tmp_path: Path) -> None:
    check(*_narrow_pair(tmp_path, seed))


def test_a_few_rows_of_such_weights_that_are_wrong_convict(tmp_path: Path) -> None:
    model, rollout, trainer = _narrow_pair(tmp_path, 10)

    def wrong(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if name == "layers.2.mlp.expert_weights":
            values = values.copy()
            values[::40] += np.array([0.05, -0.05], dtype=values.dtype)
        return values

    changed = rewrite(trainer, tmp_path / "changed", change=wrong)
    (culprit,) = bisect(rollout, changed, model=model).culprits
    assert (culprit.point, culprit.side) == ("layers.2.mlp.expert_weights", "trainer")
