"""A live job in several layouts: its states carried, its output, and a rank that dies."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import layerbisect
from layerbisect.bisect.verdict import Probe
from layerbisect.captures.carried import CarriedFile
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from layerbisect.cli import main
from layerbisect.models import make_tiny
from scripts.megatron_engine import JobError, run_job
from scripts.megatron_model import Layout
from tests.bisect.making import Engine, random_tokens

pytest.importorskip("megatron.core", reason="CI has megatron-core")
pytestmark = pytest.mark.slow

VOCAB, LAYERS = 256, 8
TOKENS = random_tokens(VOCAB, [24, 30, 24, 20])
STEPS = "tests.captures.megatron.live_steps:"
LAYOUTS = {
    "tp2": Layout(tensor=2),
    "pp2": Layout(pipeline=2),
    "ep2": Layout(expert=2),
    "pp2 ep2": Layout(pipeline=2, expert=2),
    "pp2 in two chunks": Layout(pipeline=2, virtual=2),
}

SWAPPED = 5
"""The layer whose experts have gate and up swapped, on either side."""


@dataclass(frozen=True)
class Rollouts:
    """A checkpoint, and captures of it by another engine: as it is, and with a fault."""

    model: Path
    clean: Path
    faulty: Path


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Rollouts:
    folder = tmp_path_factory.mktemp("rollouts")
    model = make_tiny(
        folder / "moe",
        "qwen3_moe",
        layers=LAYERS,
        hidden=64,
        heads=4,
        kv_heads=2,
        experts=8,
        top_k=2,
        vocab=VOCAB,
    )
    engine = Engine.load(model, "rollout")
    clean = engine.capture(folder / "clean", TOKENS)
    faults = [("gate-up-swapped", SWAPPED)]
    return Rollouts(model, clean, engine.capture(folder / "faulty", TOKENS, faults=faults))


@dataclass(frozen=True)
class Lived:
    """What a job's ranks returned, by the steps' names, and the folder of its captures."""

    ranks: list[dict[str, Any]]
    folder: Path

    def carried(self, name: str) -> CarriedFile:
        """What was written beside a capture."""
        return CarriedFile.read(self.folder / f"{name}.carried.json")


@pytest.fixture(scope="module", params=LAYOUTS)
def lived(
    request: pytest.FixtureRequest, rollouts: Rollouts, tmp_path_factory: pytest.TempPathFactory
) -> Lived:
    """One job in each layout: alone, captured, and with a fault on either side."""
    folder = tmp_path_factory.mktemp("job")
    rollout = {"rollout": str(rollouts.faulty), "vocab": VOCAB}

    def hooked(name: str, tail: Path | None = None, fault: str = "") -> dict[str, Any]:
        env = {"LAYERBISECT_CAPTURE": str(folder / name), "LAYERBISECT_POINTS": "all"}
        return {
            "do": f"{STEPS}hooked",
            "tokens": TOKENS,
            "micro_batch": 1,
            "events": ["hook:ref_", "hook:", "forward", "hook:ref_"],
            "env": env | ({"LAYERBISECT_TAIL": str(tail)} if tail else {}),
            "args": {"vocab_size": VOCAB, "qkv_format": "bshd"},
            "fault": fault,
            # the live tail runs through megatron's own schedule
            "schedule": True,
        }

    steps = {
        "alone": {"do": "forward", "tokens": TOKENS, "micro_batch": 1},
        "rollout": hooked("rollout", rollouts.faulty),
        "trainer": hooked("trainer", rollouts.clean, f"gate-up-swapped:{SWAPPED}"),
        "clean": hooked("clean", rollouts.clean),
        "by hand": {"do": f"{STEPS}carry", **rollout, "out": str(folder / "hand"), "mode": "scan"},
        "in training": {
            "do": f"{STEPS}carry", **rollout, "out": str(folder / "training"),
            "training": request.param == "pp2",
        },
        "alone again": {"do": f"{STEPS}refused_carry", **rollout, "only": 0},
        "fewer": {"do": f"{STEPS}refused_carry", **rollout, "skip": 1},
        "unread": {"do": f"{STEPS}refused_carry", **rollout, "unread": 0},
    }  # fmt: skip
    job = {"model": str(rollouts.model), "steps": list(steps.values())}
    results = run_job(job, LAYOUTS[request.param])
    return Lived([dict(zip(steps, rank, strict=True)) for rank in results], folder)


def test_the_job_computes_the_same_bits(lived: Lived) -> None:
    first = lived.ranks[0]
    assert first["rollout"]["scores"] == [first["alone"]]
    assert first["trainer"]["scores"] != [first["alone"]]
    for rank in lived.ranks:
        for name in ("rollout", "trainer", "by hand", "in training"):
            assert rank[name]["undisturbed"]
        assert rank["rollout"]["told"] == rank["trainer"]["told"] == []
    for name in ("rollout", "trainer"):
        capture = Capture.open(lived.folder / name)
        assert capture.finished and not capture.problems
        # replicas that share experts pad to one length
        assert len(capture.rows) >= sum(map(len, TOKENS))


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_the_live_trainer_finds_the_layer(lived: Lived, side: str) -> None:
    found = lived.carried(side)
    at = {one.boundary: one.gap for one in found.gaps}
    assert at[0] < 1e-4 < 0.1 * at[LAYERS]
    assert at[SWAPPED + 1] ** 2 - at[SWAPPED] ** 2 > 0.5 * at[LAYERS] ** 2
    # its own, both ends, and then one a halving
    assert found.mode == "search" and found.forwards == 1 + len(at) <= 1 + 2 + 3
    assert found.tokens == sum(map(len, TOKENS)) - len(TOKENS)


def test_a_search_finds_what_a_scan_does_whatever_runs_the_forwards(lived: Lived) -> None:
    searched = lived.carried("rollout")
    for rank in lived.ranks:
        assert rank["by hand"]["gaps"] == lived.ranks[0]["by hand"]["gaps"]
        scanned = dict(rank["by hand"]["gaps"])
        assert sorted(scanned) == list(range(LAYERS + 1))
        assert rank["by hand"]["forwards"] == LAYERS + 2
        # in training mode dropout and capacity would make another model of it
        assert dict(rank["in training"]["gaps"]).items() <= scanned.items()
    for one in searched.gaps:
        assert one.gap == pytest.approx(scanned[one.boundary], rel=0.05, abs=1e-3)


def test_nothing_is_read_out_of_a_forward_of_other_sequences(lived: Lived) -> None:
    for rank in lived.ranks:
        assert rank["fewer"].startswith("1 forwards, LayerBisectError: the trainer's own forward")
        assert re.search(
            r"was not read out: (LayerBisectError: \d+ of 94|see the log)", rank["fewer"]
        )


def test_a_rank_that_cannot_read_states_keeps_no_other_waiting(lived: Lived) -> None:
    first, *others = [rank["unread"] for rank in lived.ranks]
    assert first == (
        "2 forwards, LayerBisectError: boundary 0 was not read out: OSError: the disk is gone"
    )
    for other in others:
        assert other == (
            "2 forwards, LayerBisectError: boundary 0 was not read out: see the log of other ranks"
        )


def test_no_rank_begins_where_another_cannot(lived: Lived) -> None:
    told = [rank["alone again"] for rank in lived.ranks]
    assert "0 forwards, LayerBisectError: the ranks do not all read the same capture" in told[0]
    for other in told[1:]:
        assert re.match("0 forwards, CaptureError: .*-elsewhere holds no capture", other)


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_the_verdict_is_that_of_the_reference(lived: Lived, rollouts: Rollouts, side: str) -> None:
    pair = (rollouts.faulty if side == "rollout" else rollouts.clean, lived.folder / side)
    file = lived.folder / f"{side}.carried.json"
    offline = layerbisect.bisect(*pair, model=rollouts.model)
    live = layerbisect.bisect(*pair, model=rollouts.model, carried=file)

    def culprits(verdict: layerbisect.Verdict) -> list[Any]:
        return [(c.layer, c.point, c.operator, c.side) for c in verdict.culprits]

    assert live.status == offline.status == "divergent"
    assert culprits(live) == culprits(offline)
    assert culprits(live)[0][0] == SWAPPED and culprits(live)[0][3] == side
    assert offline.probe == Probe("scan", 2 * (LAYERS + 1), "reference")
    assert live.probe is not None and live.rounding_budget is not None
    assert replace(live.probe, floor=0.0) == Probe(
        "search", lived.carried(side).forwards, "trainer"
    )
    # what the tail's rounding makes from the first boundary on is no layer's
    assert 0 < live.probe.floor <= 1.5 * live.rounding_budget.predicted_gap
    assert live.culprits[0].share_of_gap == pytest.approx(1, abs=0.3)


def test_what_the_tail_rounds_is_no_layer_s(lived: Lived, rollouts: Rollouts) -> None:
    pair = (rollouts.clean, lived.folder / "clean")
    file = lived.folder / "clean.carried.json"
    verdict = layerbisect.bisect(*pair, model=rollouts.model, carried=file)
    assert verdict.status == "agree" and verdict.probe is not None
    gaps = {one.boundary: one.gap for one in lived.carried("clean").gaps}
    assert verdict.probe.floor == max(gaps.values())
    page = CliRunner().invoke(
        main,
        ["bisect", *map(str, pair), "--model", str(rollouts.model), "--carried", str(file)],
        terminal_width=200,
    )
    assert page.exit_code == 0 and "nat are the tail's own rounding" in page.output
    # the raw gaps stay
    assert verdict.layers[0].carried_in == gaps[0]
    assert verdict.layers[-1].carried_out == gaps[LAYERS]


def test_the_page_says_what_ran_and_how_often(lived: Lived, rollouts: Rollouts) -> None:
    names = [rollouts.faulty, lived.folder / "rollout", "--model", rollouts.model]
    file = lived.folder / "rollout.carried.json"
    page = CliRunner().invoke(main, ["bisect", *map(str, names), "--carried", str(file)])
    assert page.exit_code == 1, page.output
    forwards = lived.carried("rollout").forwards
    said = " ".join(page.output.split())
    assert f"search (boundaries chosen by halving), {forwards} forwards of the trainer" in said


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(rollout="decode"), "labels 'decode' and 'trainer', not 'rollout' and 'trainer'"),
        (dict(trainer="actor"), "labels 'rollout' and 'actor', not"),
        (dict(num_layers=LAYERS + 1), "a model of 9 layers, not 8"),
        (dict(rows="0" * 32), "other rows than .*faulty has"),
        (
            dict(tokens=7, scores=(-1.0,) * 7),
            "7 tokens, where the captures have 94 in common",
        ),
        (dict(weights="0" * 32), "a trainer with other weights than .*rollout was captured with"),
        (dict(scores=(-1.0,) * 94), "another run of the trainer, whose log-probs are .* nat from"),
        (dict(scores=(None,) * 94), "another run of the trainer, whose log-probs are inf nat from"),
    ],
)
def test_a_carried_gap_of_something_else_is_refused(
    lived: Lived, rollouts: Rollouts, change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    replace(lived.carried("rollout"), **change).write(other)
    pair = (rollouts.faulty, lived.folder / "rollout")
    with pytest.raises(LayerBisectError, match=f"does not fit the captures: it is of {told}"):
        layerbisect.bisect(*pair, model=rollouts.model, carried=other)


@pytest.mark.parametrize(
    "pair, name, told",
    [
        # the same tokens and labels: the trainer has a fault, and ran without it in the file
        (("faulty", "trainer"), "rollout", "another run of the trainer, whose log-probs are"),
        (("clean", "rollout"), "trainer", "another run of the trainer, whose log-probs are"),
        # the file's rollout has a fault
        (("clean", "rollout"), "rollout", "another run of the rollout, with other states than"),
    ],
)
def test_a_carried_gap_of_another_run_is_refused(
    lived: Lived, rollouts: Rollouts, pair: tuple[str, str], name: str, told: str
) -> None:
    sides = (getattr(rollouts, pair[0]), lived.folder / pair[1])
    file = lived.folder / f"{name}.carried.json"
    with pytest.raises(LayerBisectError, match=f"does not fit the captures: it is of {told}"):
        layerbisect.bisect(*sides, model=rollouts.model, carried=file)
    page = CliRunner().invoke(
        main,
        ["bisect", *map(str, sides), "--model", str(rollouts.model), "--carried", str(file)],
    )
    assert page.exit_code == 2


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_a_rank_that_dies_leaves_what_was_whole(
    rollouts: Rollouts, name: str, tmp_path: Path
) -> None:
    directory = tmp_path / "capture"
    step = {
        "do": f"{STEPS}dies", "capture": str(directory), "tokens": TOKENS, "vocab": VOCAB,
        "rank": 1, "call": 3,
    }  # fmt: skip
    with pytest.raises(JobError, match="rank (0, )?1 failed"):
        run_job({"model": str(rollouts.model), "steps": [step]}, LAYOUTS[name])
    capture = Capture.open(directory)
    assert not capture.finished
    place = "rank 1 \\(pp 1\\)" if name == "pp2" else "rank 1 \\(tp 1\\)"
    assert any(re.search(f"was not finished by .*{place}", text) for text in capture.problems)
    if name == "pp2":
        # the first stage was ahead
        assert any(re.search(f"which {place} did not write", text) for text in capture.problems)
    assert len(capture.rows) == len(TOKENS[0]) + len(TOKENS[1])
    assert list(capture.rows.token) == [*TOKENS[0], *TOKENS[1]]
    for layer in range(LAYERS):
        assert np.isfinite(capture.read(f"layers.{layer}.input")).all()
    assert len(capture.scores.logprob) >= len(capture.rows) - 2
