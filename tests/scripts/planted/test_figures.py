"""What counts as right, and how it is counted."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.planted import figures
from scripts.planted.fault import Truth
from scripts.planted.figures import Result
from scripts.planted.judged import accuses, right
from scripts.planted.rules import first_beyond

TRUTH = Truth(3, "attention", "rollout", "positions >= 9")


def culprit(layer: int | None, operator: str | None, side: str, where: str = "") -> dict[str, Any]:
    return {"layer": layer, "operator": operator, "side": side, "where": where, "evidence": []}


def answer(*culprits: dict[str, Any], status: str = "divergent") -> dict[str, Any]:
    return {"status": status, "culprits": list(culprits), "reasons": ["why"], "seconds": 1.0}


def result(size: float = 0.1, *, found: bool = True, effect: float = 3.0, **row: Any) -> Result:
    said = answer(culprit(3, "attention", "rollout")) if found else answer(status="agree")
    said["rules"] = {"relative error": [0.0, 0.0, 0.0, 0.0, 0.5, 0.6]}
    base = {"id": "x", "kind": "single", "size": size, "effect": effect, "floor": 1.0}
    truths = [{"layer": 3, "operator": "attention", "side": "rollout", "where": ""}]
    return Result(base | {"output": 2.0, "answer": said, "truths": truths} | row)


def test_exactly_what_was_planted_is_right() -> None:
    said = right([TRUTH], answer(culprit(3, "attention", "rollout", "positions >= 9")))
    assert said == dict.fromkeys(("layer", "operator", "side", "all", "where"), True)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (culprit(2, "attention", "rollout"), "layer"),
        (culprit(3, None, "rollout"), "operator"),
        (culprit(3, "attention", "both"), "side"),
    ],
)
def test_a_part_that_is_wrong(said: dict[str, Any], wrong: str) -> None:
    found = right([TRUTH], answer(said))
    assert [p for p in ("layer", "operator", "side") if not found[p]] == [wrong]
    assert not found["all"] and not found["where"]


def test_one_culprit_too_many_or_too_few_is_wrong() -> None:
    one, other = culprit(3, "attention", "rollout"), culprit(0, "norm", "rollout")
    assert not right([TRUTH], answer(one, other))["all"]
    assert not right([TRUTH, Truth(0, "norm", "trainer")], answer(one))["all"]


def test_a_culprit_on_both_sides_is_one_on_each() -> None:
    both = answer(culprit(3, "attention", "both"))
    truths = [Truth(3, "attention", "rollout"), Truth(3, "attention", "trainer")]
    assert right(truths, both)["all"] and not right(truths[:1], both)["all"]


def test_a_gap_blamed_on_nobody_in_particular_accuses_too() -> None:
    assert accuses(answer()) and not accuses(answer(status="agree"))
    assert not accuses(answer(status="inconclusive"))


@pytest.mark.parametrize(
    ("effect", "output", "name"),
    [(2.0, 9.0, "strong"), (1.5, 9.0, "weak"), (0.5, 2.0, "hidden"), (0.5, 0.5, "invisible")],
)
def test_how_large_a_fault_is(effect: float, output: float, name: str) -> None:
    assert result(effect=effect, output=output).class_ == name


def test_the_smallest_found_is_the_last_before_the_first_miss() -> None:
    found = {0.1: True, 0.01: True, 0.001: False, 0.0001: True}
    results = [result(size, found=was) for size, was in found.items()]
    assert figures.smallest_found(results, lambda r: r.right["all"]) == 0.01
    assert figures.smallest_found(results[2:3], lambda r: r.right["all"]) is None


def test_the_first_layer_beyond_a_threshold() -> None:
    assert first_beyond([0.0, 0.1, 0.2], 0.05) == 0
    assert first_beyond([0.1], 0.05) == -1
    assert first_beyond([0.0, float("nan")], 0.05) == 0
    assert first_beyond([0.0, 0.01], 0.05) is None


def test_a_rule_is_right_by_the_layer_alone() -> None:
    assert figures.rule_right(result(), "relative error", 0.4)
    assert not figures.rule_right(result(), "relative error", 0.55)


def test_shares_say_of_how_many() -> None:
    assert figures.share([result(), result(found=False)], lambda r: r.right["all"]) == (
        "50.0 % (1 of 2)"
    )
    assert figures.share([], lambda r: True) == "-"


def test_a_miss_says_what_was_lost_and_what_was_named_instead() -> None:
    other = result(answer=answer(culprit(2, "norm", "trainer")))
    assert figures.missed_why(other) == (
        "not named: attention of layer 3 (rollout); named beside: norm of layer 2 (trainer)"
    )
    assert figures.missed_why(result(found=False)) == "agree: why"
