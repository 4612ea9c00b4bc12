"""Operators of the real SGLang and the real megatron-core, each replayed on its captured input."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from layerbisect.bisect.bundles import layer_bundles, open_side
from layerbisect.bisect.end_bundles import end_bundles
from layerbisect.bisect.ends import end_errors
from layerbisect.bisect.own_error import own_errors
from layerbisect.captures.store import Capture
from layerbisect.kernels.judging.own_error import OwnError
from layerbisect.kernels.replay.errors import Yardstick
from layerbisect.planted_sglang import TRUTH
from tests.bisect.engine_pairs import ROLLOUT_FAULTS, TRAINER_FAULTS, Rollouts, Trainers
from tests.sglang_server import sglang_installed

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(
        not sglang_installed() or importlib.util.find_spec("megatron") is None,
        reason="SGLang and megatron-core are not both installed",
    ),
]

Convicted = set[tuple[int | None, str]]


def replayed(capture: Capture, model_directory: Path) -> Convicted:
    """Replay all that a capture shows; what is convicted is so in bisecting, to the bit."""
    model, side = open_side(capture, model_directory)
    found: Convicted = set()
    seen = 0
    for layer in (*range(model.config.num_layers), None):
        if layer is None:
            bundles = end_bundles(model, side)
            bisected = {e.point: e for e in end_errors(model, side)}
        else:
            bundles, refused = layer_bundles(model, side, layer)
            assert not refused
            bisected = {e.point: e for e in own_errors(model, side, [layer])}
        for bundle in bundles:
            yardstick = Yardstick(bundle)
            assert_same(yardstick.judge.judge(bundle.captured), bisected[bundle.point])
            # what lies beyond a bound convicts, too
            if yardstick.errors(bundle.captured, bundle.acquitted).convicted:
                found.add((bundle.layer, bundle.operator))
            seen += 1
    # of a layer of experts: all points but the choice of experts, which goes with their weights
    assert seen == 12 * model.config.num_layers + 2
    return found


def assert_same(judged: OwnError, bisected: OwnError) -> None:
    assert judged.rows == bisected.rows
    assert judged.convicted == bisected.convicted
    assert [f.name for f in judged.fits] == [f.name for f in bisected.fits]
    if judged.point == "logprob":
        # the vocabulary is summed up in one piece here, and in tiles there
        torch.testing.assert_close(judged.row_ratio, bisected.row_ratio)
    else:
        assert torch.equal(judged.row_ratio, bisected.row_ratio)
    ours, theirs = ([f.coefficient for f in e.fits] for e in (judged, bisected))
    # an eps is in units of a mean that is summed up in another order
    assert ours == pytest.approx(theirs)


def truth(fault: str) -> Convicted:
    name, _, layer = fault.partition("=")[0].partition(":")
    return {(None if name == "head-scaled" else int(layer), TRUTH[name])}


@pytest.mark.parametrize("size", [1, 2], ids=["tp1", "tp2"])
def test_what_the_server_did_wrong_is_convicted_and_what_came_after_is_not(
    rollouts: Rollouts, size: int
) -> None:
    for fault in ROLLOUT_FAULTS[size]:
        assert replayed(rollouts.side(size, fault), rollouts.model) == truth(fault), fault


@pytest.mark.parametrize("layout", ["one", "ep2"])
def test_what_megatron_did_wrong_is_convicted_and_what_came_after_is_not(
    rollouts: Rollouts, trainers: Trainers, layout: str
) -> None:
    for fault in TRAINER_FAULTS:
        capture = Capture.open(trainers.side(layout, fault))
        assert replayed(capture, rollouts.model) == truth(fault), fault


def test_nothing_is_convicted_in_a_clean_run(rollouts: Rollouts, trainers: Trainers) -> None:
    for run in ("clean", "generated"):
        assert replayed(rollouts.side(1, run), rollouts.model) == set()
    assert replayed(rollouts.side(2), rollouts.model) == set()
    assert replayed(Capture.open(trainers.side("pp2-ep2")), rollouts.model) == set()
