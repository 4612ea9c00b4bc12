"""One way to judge an operator: replaying says of an engine's output what bisecting says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from layerbisect.bisect.bundles import layer_bundles, open_side
from layerbisect.bisect.end_bundles import end_bundles
from layerbisect.bisect.ends import end_errors
from layerbisect.bisect.own_error import own_errors
from layerbisect.captures.store import Capture
from layerbisect.kernels.judging.own_error import OwnError
from layerbisect.kernels.replay.judge import Judge

if TYPE_CHECKING:
    from tests.bisect.conftest import Clean


@pytest.mark.parametrize("which", ["clean", "clean_llama"])
def test_of_every_stretch_of_every_layer(which: str, request: pytest.FixtureRequest) -> None:
    pair: Clean = request.getfixturevalue(which)
    _same_as_bisecting(pair.rollout, pair.model)


@pytest.mark.parametrize(
    "points",
    [
        ["layers.*.input", "layers.*.mid", "*.mlp.expert_ids", "*.mlp.expert_weights"],
        ["layers.*.input", "layers.*.attn.context", "layers.*.attn.out", "layers.*.mid"],
    ],
)
def test_of_stretches_behind_hidden_points(points: list[str], clean: Clean, tmp_path: Path) -> None:
    captured = clean.engines["rollout"].capture(tmp_path / "c", clean.tokens, points=points)
    _same_as_bisecting(captured, clean.model)


@pytest.mark.parametrize("layout", ["padded", "decode"])
def test_whatever_the_layout(layout: str, clean: Clean, tmp_path: Path) -> None:
    captured = clean.engines["rollout"].capture(tmp_path / "c", clean.tokens, layout=layout)
    _same_as_bisecting(captured, clean.model)


def _same_as_bisecting(directory: Path, model_directory: Path) -> None:
    model, side = open_side(Capture.open(directory), model_directory)
    compared = 0
    for layer in range(model.config.num_layers):
        by_point = {e.point: e for e in own_errors(model, side, [layer])}
        bundles, _ = layer_bundles(model, side, layer)
        for bundle in bundles:
            judge = Judge(bundle)
            _equal(judge.judge(bundle.captured), by_point[bundle.point])
            compared += 1
    ends = {e.point: e for e in end_errors(model, side)}
    for bundle in end_bundles(model, side):
        _equal(Judge(bundle).judge(bundle.captured), ends[bundle.point])
        compared += 1
    assert compared >= 2 * model.config.num_layers


def _equal(replayed: OwnError, bisected: OwnError) -> None:
    assert replayed.rows == bisected.rows
    assert replayed.operator == bisected.operator
    assert replayed.covers == bisected.covers
    assert [f.name for f in replayed.fits] == [f.name for f in bisected.fits]
    assert torch.equal(replayed.row_ratio, bisected.row_ratio), replayed.point
    assert replayed.ratio == bisected.ratio
    assert replayed.floor == bisected.floor
