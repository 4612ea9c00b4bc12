"""The real SGLang server against the real megatron-core, in every layout that a CPU can run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.store import Capture
from layerbisect.cli import main
from layerbisect.planted_sglang import TRUTH
from tests.bisect.engine_pairs import (
    COARSE_FAULTS,
    LAYOUTS,
    ROLLOUT_FAULTS,
    STALE_LAYER,
    TRAINER_FAULTS,
    Rollouts,
    Trainers,
    corrupted,
    edited,
    without_rank,
)
from tests.sglang_server import sglang_installed

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(
        not sglang_installed() or importlib.util.find_spec("megatron") is None,
        reason="SGLang and megatron-core are not both installed",
    ),
]

SIZES = (1, 2)
in_every_layout = pytest.mark.parametrize("layout", LAYOUTS)
of_either_size = pytest.mark.parametrize("size", SIZES, ids=["rollout-tp1", "rollout-tp2"])

Blamed = list[tuple[int | None, str | None, str]]


def judge(rollout: Capture, trainer: Path, rollouts: Rollouts) -> Verdict:
    return bisect(rollout, trainer, model=rollouts.model)


def blamed(verdict: Verdict) -> Blamed:
    return [(c.layer, c.operator, c.side) for c in verdict.culprits]


def truth(fault: str, side: str) -> Blamed:
    name, _, layer = fault.partition("=")[0].partition(":")
    at_the_end = name in ("head-scaled", "final-norm-weight")
    return [(None if at_the_end else int(layer), TRUTH[name], side)]


def command(
    rollouts: Rollouts, trainer: Path, *options: str, size: int = 2, run: str = "clean"
) -> Result:
    given = ("--model", rollouts.model, "--rollout-requests", f"{run}-*", *options)
    arguments = ("bisect", rollouts.captures[size], trainer, *given)
    return CliRunner().invoke(main, [str(one) for one in arguments])


@in_every_layout
@of_either_size
def test_a_clean_pair_agrees(
    rollouts: Rollouts, trainers: Trainers, layout: str, size: int
) -> None:
    verdict = judge(rollouts.side(size), trainers.side(layout), rollouts)
    assert verdict.status == "agree" and verdict.exit_code == 0, verdict.reasons
    assert verdict.culprits == ()
    assert verdict.gap is not None and verdict.gap.mae > 0.005
    tokens = rollouts.tokens
    assert verdict.gap.rows == sum(map(len, tokens)) - len(tokens)
    # no layout was described by anybody, and everything was joined
    assert verdict.coverage.points.missing == ()
    assert verdict.coverage.points.compared == 4 * 13 + 3
    assert verdict.coverage.rows.joined == sum(map(len, tokens))
    assert verdict.coverage.rows.left_out == 0
    # of two tensor-parallel ranks none holds a cut tensor whole
    told = ("computed no token twice", "tensors compared, and they match the model directory")
    assert all(any(words in note for words in told) for note in verdict.coverage.notes)


def test_what_the_server_decoded_agrees_too(rollouts: Rollouts, trainers: Trainers) -> None:
    verdict = judge(rollouts.side(1, "generated"), trainers.side("pp2-ep2"), rollouts)
    assert verdict.status == "agree", verdict.reasons
    # the last token of each was never fed back: the trainer alone has its row
    assert verdict.coverage.rows.left_out == len(rollouts.tokens)


def test_a_capture_is_whole_and_tells_its_layout(rollouts: Rollouts, trainers: Trainers) -> None:
    info: dict[str, Any] = {}
    for layout in LAYOUTS:
        capture = Capture.open(trainers.side(layout))
        assert capture.finished and capture.problems == ()
        assert capture.info.engine == "megatron-core"
        info[layout] = {n: s for n, s in capture.info.parallel.items() if s > 1}
    assert info == {
        "one": {},
        "pp2": {"pp": 2},
        "ep2": {"dp": 2, "ep": 2},
        "pp2-ep2": {"pp": 2, "dp": 2, "ep": 2},
        "tp2": {"tp": 2, "etp": 2},
    }


@in_every_layout
@of_either_size
def test_a_fault_in_the_server_is_found_on_the_rollout_side(
    rollouts: Rollouts, trainers: Trainers, layout: str, size: int
) -> None:
    for fault in ROLLOUT_FAULTS[size]:
        verdict = judge(rollouts.side(size, fault), trainers.side(layout), rollouts)
        assert blamed(verdict) == truth(fault, "rollout"), fault
        assert verdict.exit_code == 1


@in_every_layout
def test_a_fault_in_megatron_is_found_on_the_trainer_side(
    rollouts: Rollouts, trainers: Trainers, layout: str
) -> None:
    for number, fault in enumerate(TRAINER_FAULTS):
        rollout = rollouts.side(SIZES[number % 2])
        verdict = judge(rollout, trainers.side(layout, fault), rollouts)
        assert blamed(verdict) == truth(fault, "trainer"), fault
        assert verdict.exit_code == 1


@pytest.mark.parametrize("layout", ["ep2", "pp2-ep2"])
def test_experts_of_either_rank_that_took_each_others_tokens_are_named(
    rollouts: Rollouts, trainers: Trainers, layout: str
) -> None:
    for fault, experts in (("experts-swapped:0", "0, 1"), ("experts-swapped:3=4", "4, 5")):
        verdict = judge(rollouts.side(1), trainers.side(layout, fault), rollouts)
        assert verdict.culprits[0].where == f"tokens routed to expert {experts}"


@in_every_layout
def test_a_coarse_capture_names_the_layer_and_the_side(
    rollouts: Rollouts, trainers: Trainers, layout: str
) -> None:
    clean = judge(rollouts.side(2), trainers.side(layout, "coarse"), rollouts)
    assert clean.status == "agree", clean.reasons
    assert "4 of 4 layers are not seen operator by operator" in clean.coverage.notes[0]
    for fault in COARSE_FAULTS:
        verdict = judge(rollouts.side(2), trainers.side(layout, f"coarse {fault}"), rollouts)
        ((layer, _, side),) = truth(fault, "trainer")
        assert blamed(verdict) == [(layer, None, side)]
        assert f"points layers.{layer}," in verdict.next


@in_every_layout
def test_a_trainer_with_a_stale_layer_has_other_weights(
    rollouts: Rollouts, trainers: Trainers, layout: str
) -> None:
    verdict = judge(rollouts.side(2), trainers.side(layout, "stale"), rollouts)
    assert blamed(verdict) == [(STALE_LAYER, "weights", "trainer")]
    assert "weights the trainer side loaded" in verdict.next


@in_every_layout
def test_rows_of_other_tokens_or_of_another_context_are_no_pair(
    rollouts: Rollouts, trainers: Trainers, layout: str
) -> None:
    done = command(rollouts, trainers.side(layout, "other tokens"))
    assert done.exit_code == 2 and "different tokens at position 0: rollout has " in done.stderr
    done = command(rollouts, trainers.side(layout, "adapter"))
    assert done.exit_code == 2 and "have no row in common: 192 and 192 rows" in done.stderr


def test_a_stage_without_its_folder_is_named_and_its_layers_are_not_judged(
    rollouts: Rollouts, trainers: Trainers, tmp_path: Path
) -> None:
    for rank, layers in ((0, "01"), (1, "23")):
        capture = without_rank(trainers.side("pp2"), tmp_path / str(rank), rank)
        done = command(rollouts, capture, "--json")
        verdict = json.loads(done.stdout)
        assert done.exit_code == 2 and verdict["status"] == "inconclusive"
        assert f"trainer: ranks [{rank}] of 2 wrote nothing" in verdict["coverage"]["notes"]
        (reason,) = verdict["reasons"]
        assert f"trainer was to hold layers.{layers[0]}.input and does not" in reason
        missing = verdict["coverage"]["points"]["missing"]
        assert {p.split(".")[1] for p in missing if ": layers." in p} == set(layers)


def test_a_replica_without_its_folder_is_named_and_its_tokens_are_left_out(
    rollouts: Rollouts, trainers: Trainers, tmp_path: Path
) -> None:
    capture = without_rank(trainers.side("ep2"), tmp_path / "capture", 1)
    verdict = judge(rollouts.side(2), capture, rollouts)
    assert "trainer: ranks [1] of 2 wrote nothing" in verdict.coverage.notes
    assert verdict.coverage.rows.joined == verdict.coverage.rows.left_out == 96
    assert "the trainer capture is not whole (ranks [1] of 2 wrote nothing)" in verdict.next


def test_a_shard_without_its_folder_is_named_and_nothing_is_judged(
    rollouts: Rollouts, trainers: Trainers, tmp_path: Path
) -> None:
    for rank in (0, 1):
        capture = without_rank(trainers.side("tp2"), tmp_path / str(rank), rank)
        done = command(rollouts, capture)
        assert done.exit_code == 2 and done.stdout == ""
        assert "layers.0.attn.q: shards do not tile it: 50% of the values" in done.stderr
        assert f"ranks [{rank}] of 2 wrote nothing" in done.stderr


def test_a_coarse_capture_without_one_shard_has_no_log_probs_and_judges_no_head(
    rollouts: Rollouts, trainers: Trainers, tmp_path: Path
) -> None:
    capture = without_rank(trainers.side("tp2", "coarse"), tmp_path / "capture", 1)
    notes = judge(rollouts.side(2), capture, rollouts).coverage.notes
    assert "trainer: ranks [1] of 2 wrote nothing" in notes
    assert any("scored the tokens [0, 128) of a vocabulary of 250" in note for note in notes)
    assert any("the head is not judged" in note for note in notes)


def test_shards_that_do_not_tile_are_refused(
    rollouts: Rollouts, trainers: Trainers, tmp_path: Path
) -> None:
    def refusal(new: str) -> str:
        old = rb"\"head\": [2, 4, 4]"
        target = tmp_path / f"capture{len(list(tmp_path.iterdir()))}"
        capture = edited(trainers.side("tp2"), target, 1, old, new.replace('"', r"\"").encode())
        done = command(rollouts, capture)
        assert done.exit_code == 2 and done.stdout == ""
        return done.stderr

    assert "shards overlap without being replicas" in refusal('"head": [1, 3, 4]')
    assert "shards do not tile it: 50% of the values" in refusal('"head": [0, 2, 4]')
    assert "is damaged" in refusal('"head": [3, 5, 4]')


def test_copies_of_the_stream_that_differ_between_ranks_are_a_finding(
    rollouts: Rollouts, trainers: Trainers, tmp_path: Path
) -> None:
    point = "layers.2.input"
    capture = corrupted(trainers.side("tp2"), tmp_path / "capture", 1, point, 64)
    verdict = judge(rollouts.side(2), capture, rollouts)
    (finding,) = (note for note in verdict.coverage.notes if "replicas" in note)
    assert finding.startswith(f"trainer: {point}: replicas disagree: rank-1 differs in 64 values")
    # the copy that is judged is the corrupted one
    capture = corrupted(trainers.side("tp2"), tmp_path / "judged", 0, point, 64)
    verdict = judge(rollouts.side(2), capture, rollouts)
    blamed = [c for c in verdict.culprits if c.layer == 2]
    assert blamed and all(any("replicas disagree" in line for line in c.evidence) for c in blamed)
