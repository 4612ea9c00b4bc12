"""The verdict's contract: keys, JSON, exit codes, and what each part of it says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import (
    EXIT_CODES,
    Coverage,
    CoveredRows,
    Culprit,
    Gap,
    Points,
    Status,
    Verdict,
)
from tests.bisect.conftest import Clean
from tests.bisect.making import rewrite

OPERATORS = {
    "embedding",
    "norm",
    "linear",
    "rope",
    "attention",
    "router",
    "dispatch",
    "experts",
    "combine",
    "head",
    "logprob",
    "weights",
    "inputs",
    "residual",
}
KINDS = {"norm", "residual", "linear", "attention", "router", "experts", "head"}


def check(plain: dict[str, Any]) -> None:
    """Hold plain data against the contract of a verdict."""
    assert next(iter(plain)) == "schema" and plain["schema"] == 1
    assert plain["status"] in EXIT_CODES
    assert {
        "gap",
        "culprits",
        "ruled_out",
        "rounding_budget",
        "coverage",
        "next",
        "reasons",
        "layers",
        "differences",
        "probe",
        "labels",
    } <= plain.keys()
    if plain["gap"] is not None:
        assert {"mae", "signed_mean", "p95", "p99", "max", "rows", "unit"} <= plain["gap"].keys()
        assert plain["gap"]["unit"] == "nat"
    for culprit in plain["culprits"]:
        assert {
            "layer",
            "point",
            "operator",
            "side",
            "share_of_gap",
            "own_error",
            "floor",
            "where",
            "evidence",
        } == culprit.keys()
        assert culprit["operator"] in OPERATORS | {None}
        assert culprit["side"] in (*plain["labels"], "both", "unknown")
        assert isinstance(culprit["evidence"], list)
        assert all(isinstance(line, str) and "\n" not in line for line in culprit["evidence"])
    for one in plain["ruled_out"]:
        assert one.keys() == {"hypothesis", "evidence"}
    if plain["rounding_budget"] is not None:
        assert {"predicted_gap", "shares"} <= plain["rounding_budget"].keys()
        assert plain["rounding_budget"]["shares"].keys() == KINDS
    assert plain["coverage"]["points"].keys() == {"compared", "missing"}
    assert plain["coverage"]["rows"].keys() == {"joined", "left_out"}
    # strict JSON, and the same again after a round trip
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


@pytest.fixture(scope="module")
def clean_verdict(clean: Clean) -> Verdict:
    return bisect(clean.rollout, clean.trainer, model=clean.model)


def test_a_clean_verdict(clean_verdict: Verdict) -> None:
    check(clean_verdict.to_json())
    plain = clean_verdict.to_json()
    assert (plain["status"], plain["culprits"]) == ("agree", [])
    assert plain["coverage"]["rows"] == {"joined": 144, "left_out": 0}
    assert plain["coverage"]["points"]["missing"] == []
    assert plain["coverage"]["points"]["compared"] == len(plain["differences"]) > 50
    assert [layer["layer"] for layer in plain["layers"]] == [0, 1, 2, 3]
    assert all(layer["own_error"].keys() == {"rollout", "trainer"} for layer in plain["layers"])
    assert bool(clean_verdict)
    hypotheses = {one["hypothesis"] for one in plain["ruled_out"]}
    assert {"rollout runs other weights", "trainer runs other weights"} <= hypotheses


def test_a_verdict_with_a_culprit(clean: Clean, tmp_path: Path) -> None:
    faulty = clean.engines["trainer"].capture(
        tmp_path / "faulty", clean.tokens, faults=[("softmax-scale", 1)]
    )
    verdict = bisect(clean.rollout, faulty, model=clean.model)
    check(verdict.to_json())
    (culprit,) = verdict.to_json()["culprits"]
    assert culprit["layer"] == 1 and culprit["operator"] == "attention"
    assert culprit["side"] == "trainer" and culprit["point"] == "layers.1.attn.context"
    assert culprit["own_error"] > culprit["floor"] > 0
    assert any("systematic, softmax scale +0.0" in line for line in culprit["evidence"])
    assert verdict.next == (
        f"`layerbisect replay {faulty} --model {clean.model} --layer 1 --operator attention`"
    )
    assert not verdict


def test_a_verdict_that_could_not_be_reached(clean: Clean, tmp_path: Path) -> None:
    few = rewrite(
        clean.rollout,
        tmp_path / "few",
        rows=[True] * 5 + [False] * 139,  # type: ignore[arg-type]
    )
    verdict = bisect(few, clean.trainer, model=clean.model)
    check(verdict.to_json())
    plain = verdict.to_json()
    assert plain["gap"] is plain["rounding_budget"] is plain["probe"] is None
    assert plain["layers"] == [] and plain["status"] == "inconclusive"
    assert plain["next"].startswith("`layerbisect show")


@pytest.mark.parametrize(
    ("status", "code"), [("agree", 0), ("divergent", 1), ("unstable", 2), ("inconclusive", 2)]
)
def test_exit_codes(status: Status, code: int, clean_verdict: Verdict) -> None:
    verdict = dataclasses.replace(clean_verdict, status=status)
    assert verdict.exit_code == code and bool(verdict) is (code == 0)
    check(verdict.to_json())


def test_what_is_not_finite_becomes_null() -> None:
    nan = float("nan")
    verdict = Verdict(
        status="divergent",
        gap=Gap(nan, float("inf"), nan, nan, -float("inf"), 0),
        culprits=(
            Culprit(None, "layers.*", "weights", "rollout", nan, nan, nan, "everywhere", ("x",)),
        ),
        ruled_out=(),
        rounding_budget=None,
        coverage=Coverage(Points(0, ()), CoveredRows(0, 0)),
        next="",
    )
    plain = verdict.to_json()
    check(plain)
    assert plain["gap"]["mae"] is plain["gap"]["signed_mean"] is plain["gap"]["max"] is None
    assert plain["culprits"][0]["own_error"] is None


def test_results_cannot_be_changed(clean_verdict: Verdict) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        clean_verdict.status = "divergent"  # type: ignore[misc]


def test_an_engine_that_does_not_repeat_itself_is_unstable(clean: Clean, tmp_path: Path) -> None:
    # the same tokens twice, and the second time other log-probs than the first
    engine = clean.engines["rollout"]
    twice = engine.capture(tmp_path / "twice", [*clean.tokens, *clean.tokens])

    def shaken(logprobs: Any) -> Any:
        logprobs[len(logprobs) // 2 :] += 0.5
        return logprobs

    moved = rewrite(twice, tmp_path / "moved", logprobs=shaken)
    verdict = bisect(moved, clean.trainer, model=clean.model)
    assert verdict.status == "unstable" and verdict.exit_code == 2, verdict.reasons
    assert "no larger than what one engine differs from itself" in verdict.reasons[0]
    steady = bisect(twice, clean.trainer, model=clean.model)
    assert steady.status == "agree"
    assert "rollout does not repeat itself" in {one.hypothesis for one in steady.ruled_out}
