"""A saved response carried across an update: which side kept the old weights."""

import numpy as np
import pytest

from layerbisect.bisect.scores.update import judge_update
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from tests.bisect.scores.making import below, run


def carried(*, rollout: bool, trainer: bool, seed: int = 1) -> Verdict:
    """Carry a run across an update that the named sides have."""
    old = run(0)
    generator = np.random.default_rng(seed)
    columns = {name: Scoring() for name in ("B0", "B1", "C0", "C1")}
    calls = []
    for call in old:
        shift = generator.normal(size=len(call.response))
        scores = {}
        for name in columns:
            updated = rollout if name[0] == "B" else trainer
            scores[name] = below(call.scores[name] + shift) if updated else call.scores[name]
        calls.append(Call.of(call.name, call.prompt, call.response, scores))
    return judge_update(old, ScoreRecord(RecordInfo(columns=columns), calls))


def test_an_installed_update_agrees() -> None:
    verdict = carried(rollout=True, trainer=True)
    assert (verdict.status, verdict.culprits) == ("agree", ())
    assert verdict.ruled_out[0].hypothesis == "stale weights"


@pytest.mark.parametrize("stale", ["rollout", "trainer"])
def test_a_side_that_scores_as_before_is_stale(stale: str) -> None:
    verdict = carried(rollout=stale != "rollout", trainer=stale != "trainer")
    (culprit,) = verdict.culprits
    assert (verdict.status, culprit.side, culprit.operator) == ("divergent", stale, "weights")
    assert f"the {stale} scores as it did before" in culprit.evidence[0]


def rebatched(*, installed: bool, drift: float, seed: int) -> Verdict:
    """An update of size ``drift``, with the rollout's replay in another batch than before."""
    old = run(seed, noise=0.01)
    generator = np.random.default_rng(seed)
    columns = {name: Scoring() for name in ("B0", "B1", "C0", "C1")}
    calls = []
    for call in old:
        shift = generator.normal(size=len(call.response)) * drift
        other = generator.normal(size=len(call.response)) * 0.008
        b = below(call.scores["B0"] + other + (shift if installed else 0.0))
        c = below(call.scores["C0"] + shift)
        scores = {"B0": b, "B1": b, "C0": c, "C1": c}
        calls.append(Call.of(call.name, call.prompt, call.response, scores))
    return judge_update(old, ScoreRecord(RecordInfo(columns=columns), calls))


@pytest.mark.parametrize("seed", range(5))
def test_a_stale_rollout_in_another_batch_is_stale(seed: int) -> None:
    verdict = rebatched(installed=False, drift=0.05, seed=seed)
    assert [(c.operator, c.side) for c in verdict.culprits] == [("weights", "rollout")]
    assert not any(r.hypothesis == "stale weights" for r in verdict.ruled_out)


@pytest.mark.parametrize("seed", range(5))
def test_an_installed_update_in_another_batch_is_not_stale(seed: int) -> None:
    verdict = rebatched(installed=True, drift=0.05, seed=seed)
    assert not [c for c in verdict.culprits if c.operator == "weights"]
    assert verdict.ruled_out[0].hypothesis == "stale weights"


@pytest.mark.parametrize("installed", [True, False])
def test_an_update_smaller_than_noise_is_neither(installed: bool) -> None:
    verdict = rebatched(installed=installed, drift=0.002, seed=9)
    assert not verdict.culprits
    assert not any(r.hypothesis == "stale weights" for r in verdict.ruled_out)
    assert "cannot tell whether both sides have the update" in verdict.reasons[-1]


def test_two_sides_that_score_as_before_were_not_updated() -> None:
    verdict = carried(rollout=False, trainer=False)
    assert verdict.status == "inconclusive" and "no update" in verdict.reasons[0]


def test_other_responses_are_refused() -> None:
    old = run(0)
    new = run(1)
    with pytest.raises(LayerBisectError, match="'s0' has other tokens"):
        judge_update(old, new)
    with pytest.raises(LayerBisectError, match="is in one record alone"):
        judge_update(old, run(0, responses=7))


def test_a_missing_repeat_is_refused() -> None:
    old = run(0)
    columns = {"B0": Scoring(), "C0": Scoring()}
    calls = [Call.of(c.name, c.prompt, c.response, {k: c.scores[k] for k in columns}) for c in old]
    with pytest.raises(LayerBisectError, match="no column B1"):
        judge_update(old, ScoreRecord(RecordInfo(columns=columns), calls))
