"""What is shown of single tokens is what the captures hold, and the worst of it survives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from layerbisect.bisect.carried_gap import CarriedGap
from layerbisect.bisect.case import Case
from layerbisect.bisect.join import join
from layerbisect.bisect.locate import bisect
from layerbisect.bisect.progress import NoProgress
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.bisect.token_evidence import token_report
from layerbisect.bisect.token_report import Heatmap, TokenReport
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.store import Capture
from tests.bisect.conftest import Clean
from tests.bisect.making import rewrite


def shown(verdict: Verdict) -> TokenReport:
    assert verdict.tokens is not None
    return verdict.tokens


def by_measure(tokens: TokenReport) -> dict[str, Heatmap]:
    return {heatmap.measure: heatmap for heatmap in tokens.heatmaps}


@pytest.fixture(scope="module")
def verdict(clean: Clean) -> Verdict:
    return bisect(clean.rollout, clean.trainer, model=clean.model)


def test_tokens_are_the_gap_s(clean: Clean, verdict: Verdict) -> None:
    tokens, gap = shown(verdict), verdict.gap
    assert gap is not None and tokens.distribution is not None
    assert sum(tokens.distribution.counts) == gap.rows == sum(b.tokens for b in tokens.by_position)
    mean = sum(b.tokens * b.mae for b in tokens.by_position) / gap.rows
    assert mean == pytest.approx(gap.mae)
    assert [(b.start, b.stop) for b in tokens.by_position][:3] == [(1, 2), (2, 4), (4, 8)]
    sizes = [abs(one.difference) for one in tokens.worst]
    assert len(sizes) == 20 and sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(gap.max, rel=5e-4)
    lines = {one.name: one for one in tokens.sequences}
    assert [list(one.tokens) for _, one in sorted(lines.items())] == clean.tokens
    for worst in tokens.worst:
        line = lines[worst.call]
        assert line.tokens[worst.position] == worst.token
        assert (line.first[worst.position], line.second[worst.position]) == (
            worst.first,
            worst.second,
        )
    assert all(one.start == 0 and one.first[0] is None for one in tokens.sequences)


def test_heatmaps_show_what_was_measured(verdict: Verdict) -> None:
    found = by_measure(shown(verdict))
    assert found.keys() == {"stream", "carried gap"}
    assert all(h.boundaries == (0, 1, 2, 3, 4) and len(h.columns) == 144 for h in found.values())
    for layer in verdict.layers:
        cells = [v for v in found["carried gap"].values[layer.layer] if v is not None]
        # the last row of each of three sequences has no token after it
        assert len(cells) == 141
        assert np.mean(cells) == pytest.approx(layer.carried_in, rel=1e-3, abs=1e-12)
    of_point = {one.point: one for one in verdict.differences}
    for place, boundary in enumerate(found["stream"].boundaries):
        point = f"layers.{boundary}.input" if boundary < 4 else "layers.3.output"
        cells = [v for v in found["stream"].values[place] if v is not None]
        assert max(cells) == pytest.approx(of_point[point].max, rel=5e-4)
        assert np.median(cells) == pytest.approx(of_point[point].median, rel=1e-3)


def test_own_errors_are_of_all_judged_operators_in_order(verdict: Verdict) -> None:
    for side in ("rollout", "trainer"):
        mine = [one for one in verdict.own_errors if one.side == side]
        layers = [one.layer for one in mine]
        assert mine[0].operator == "embedding" and mine[-1].operator == "head"
        assert layers[1:-2] == sorted(layers[1:-2], key=lambda n: n or 0) and layers[-1] is None
        assert {n for n in layers if n is not None} == {0, 1, 2, 3}
        for layer in verdict.layers:
            point = layer.worst_point[side]
            (own,) = [one for one in mine if (one.layer, one.point) == (layer.layer, point)]
            assert own.own_error == layer.own_error[side]
    assert not any(one.convicted for one in verdict.own_errors)


def test_environments_say_how_each_side_ran(verdict: Verdict) -> None:
    rollout, trainer = verdict.environments["rollout"], verdict.environments["trainer"]
    assert rollout["engine"] == trainer["engine"] == "transformers"
    assert {k for k in rollout if rollout[k] != trainer.get(k)} == {
        "attn_implementation",
        "experts_implementation",
    }
    assert {"torch", "python", "device", "dtype", "routes", "phases"} <= rollout.keys()
    assert rollout["modes"] == "eval mode, without gradients"
    assert all(type(value) is str for facts in (rollout, trainer) for value in facts.values())


def test_what_is_not_finite_is_left_out_and_the_rest_shown(clean: Clean, tmp_path: Path) -> None:
    def broken(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if name in ("layers.1.mlp.out", "layers.1.output", "layers.2.input"):
            values[7:9] = np.nan
        return values

    def infinite(logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
        logprobs[5] = -np.inf
        return logprobs

    other = rewrite(clean.rollout, tmp_path / "nan", change=broken, logprobs=infinite)
    found = bisect(other, clean.trainer, model=clean.model)
    tokens = shown(found)
    assert found.gap is None and tokens.distribution is not None
    assert sum(tokens.distribution.counts) == 140 and len(tokens.worst) == 20
    (stream,) = tokens.heatmaps
    empty = [sum(cell is None for cell in row) for row in stream.values]
    assert empty == [0, 0, 2, 0, 0]
    json.dumps(found.to_json(), allow_nan=False)


def test_without_scores_the_streams_are_shown(clean: Clean, tmp_path: Path) -> None:
    bare = rewrite(clean.rollout, tmp_path / "bare", logprobs=None)
    tokens = shown(bisect(bare, clean.trainer, model=clean.model))
    assert tokens.distribution is None and tokens.worst == () == tokens.by_position
    assert by_measure(tokens).keys() == {"stream", "carried gap"}
    for one in tokens.sequences:
        assert set(one.first) == {None} and None not in one.second[1:]


def test_a_shared_prefix_is_shown_once_and_told_in_each_sequence(
    clean: Clean, tmp_path: Path
) -> None:
    start = clean.tokens[0][:20]
    lines = [start + clean.tokens[1][:20], start + clean.tokens[2][:20]]
    both = [clean.engines[name].capture(tmp_path / name, lines) for name in ("rollout", "trainer")]
    found = bisect(*both, model=clean.model)
    tokens = shown(found)
    assert sorted(list(one.tokens) for one in tokens.sequences) == sorted(lines)
    assert all(None not in one.first[1:] for one in tokens.sequences)
    assert found.gap is not None and found.gap.rows == 59
    carried = by_measure(tokens)["carried gap"]
    # the row at which they part predicts a token of each
    assert [c.start for c in carried.columns].count(19) == 2 and len(carried.columns) == 61
    assert sum(cell is not None for cell in carried.values[-1]) == 59


def test_the_last_token_of_a_generation_is_there_though_it_has_no_row(
    clean: Clean, tmp_path: Path
) -> None:
    # a generation's last token is scored and never fed
    rows = np.concatenate([np.arange(len(line)) < len(line) - 1 for line in clean.tokens])
    fed = rewrite(clean.rollout, tmp_path / "fed", rows=rows, unfed=True)
    assert len(Capture.open(fed).scores.rows) == 141
    tokens = shown(bisect(fed, clean.trainer, model=clean.model))
    assert sorted(list(one.tokens) for one in tokens.sequences) == sorted(clean.tokens)
    assert all(None not in (*one.first[1:], *one.second[1:]) for one in tokens.sequences)


def test_boundaries_that_were_not_probed_are_not_shown(clean: Clean) -> None:
    found = bisect(clean.rollout, clean.trainer, model=clean.model, probe="search")
    heatmaps = by_measure(shown(found))
    probed = {one.layer for one in found.layers if one.carried_in is not None}
    assert set(heatmaps["carried gap"].boundaries) == probed | {4}
    assert heatmaps["stream"].boundaries == (0, 1, 2, 3, 4)


def test_a_live_trainer_s_carried_gap_is_of_no_single_tokens(clean: Clean) -> None:
    first, second = Capture.open(clean.rollout), Capture.open(clean.trainer)
    joined = join(first, second)
    model = ReferenceModel.from_directory(clean.model)
    row = joined.chains.row
    sides = (
        Side(first, joined.chains, joined.rollout[row], model.compute_dtype),
        Side(second, joined.chains, joined.trainer[row], model.compute_dtype),
    )
    case = Case(model, sides, joined, NoProgress(), str(clean.model))
    live = CarriedGap({0: 0.0, 4: 0.01}, "scan", 3, "trainer")
    tokens = token_report(case, {}, live)
    assert tokens.heatmaps == () and len(tokens.worst) == 20 and len(tokens.sequences) == 3


def test_rows_without_their_sequence_s_start_still_have_their_worst_tokens(
    clean: Clean, tmp_path: Path
) -> None:
    late = np.concatenate([np.arange(len(line)) >= 5 for line in clean.tokens])
    cut = [
        rewrite(side, tmp_path / side.name, rows=late, context=True)
        for side in (clean.rollout, clean.trainer)
    ]
    found = bisect(*cut, model=clean.model)
    tokens = shown(found)
    assert found.status == "inconclusive"
    assert tokens.sequences == () == tokens.heatmaps
    assert len(tokens.worst) == 20 and min(one.start for one in tokens.by_position) == 4
