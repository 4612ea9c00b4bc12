"""The table of what a deterministic mode changes and costs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from layerbisect.kernels.replay.deterministic import Pair, deterministic_table
from layerbisect.kernels.replay.replayer import replay
from layerbisect.kernels.replay.report import Replay, Result
from scripts.operator_bundles import Maker
from tests.kernels.replay.test_false_alarms import SIZES, TORCH


@pytest.fixture(scope="module")
def replayed() -> Replay:
    """A linear projection, by torch."""
    (bundle,) = [one for one in Maker(SIZES).all() if one.point == "linear"]
    return replay(bundle, isolate=False, known=TORCH, repeats=2)


def rows(replayed: Replay, *results: Result) -> list[Pair]:
    return list(deterministic_table([replace(replayed, results=results)]))


def named(replayed: Replay, name: str, **more: Any) -> Result:
    (ran, *_) = [one for one in replayed.results if one.name == "torch"]
    return replace(ran, name=name, **more)


def test_a_fast_one_stands_beside_its_twin(replayed: Replay) -> None:
    fast = named(replayed, "t-fast", mode="fast", family="t", time_ms=2.0)
    fixed = named(replayed, "t-fixed", mode="deterministic", family="t", time_ms=3.0)
    other = named(replayed, "u", mode="fast", family="u")
    (pair, lonely) = rows(replayed, fixed, named(replayed, "torch"), fast, other)
    assert (pair.point, pair.operator, pair.family) == ("linear", "linear", "t")
    assert (pair.off, pair.on) == (fast, fixed)
    assert pair.time_ratio == 1.5
    assert pair.error_ratio[0] == pair.error_ratio[1] is not None
    assert (lonely.off, lonely.on, lonely.time_ratio) == (other, None, None)
    plain = json.loads(json.dumps(pair.to_json(), allow_nan=False))
    assert plain["time_ratio"] == 1.5
    assert plain["off"]["batches"]["rows"] == 0


def test_one_that_did_not_run_says_why(replayed: Replay) -> None:
    fast = named(replayed, "t-fast", mode="fast", family="t", time_ms=2.0)
    died = named(
        replayed, "t-fixed", mode="deterministic", family="t", state="crashed", errors=None
    )
    (pair,) = rows(replayed, fast, died)
    assert pair.on == died and pair.time_ratio is None
    assert pair.error_ratio[1] is None
    ran = replace(died, name="t (in float32)", state="ran", errors=fast.errors)
    (pair,) = rows(replayed, fast, died, ran)
    assert pair.on == ran


def test_twins_that_compute_the_same_part_of_a_stretch_stand_together(replayed: Replay) -> None:
    common: dict[str, Any] = {"family": "t", "mode": "fast"}
    norm = named(replayed, "t-norm", filled=("linear",), **common)
    both = named(replayed, "t", filled=(), **common)
    fixed = named(replayed, "t-fixed", mode="deterministic", family="t", filled=())
    (pair,) = rows(replayed, norm, both, fixed)
    assert pair.off == both
    assert rows(replayed) == []
