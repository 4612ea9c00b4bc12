"""Pages of every kind at 80 and 100 columns: no line is over, and nothing of a figure is lost."""

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from layerbisect.bisect.routing_report import CAUSES, Explained, LayerRouting, RouteGap, Routing
from layerbisect.bisect.scores.judge import judge
from layerbisect.bisect.scores.side_by_side import compare_runs
from layerbisect.bisect.training_report import (
    Apart,
    Cause,
    Recomputed,
    RouteOrigin,
    TrainingVerdict,
)
from layerbisect.bisect.verdict import Coverage, CoveredRows, Points, Verdict
from layerbisect.bisect.verdict_json import verdict_from_json
from layerbisect.bisect.weight_diff.report import Finding, WeightCoverage, WeightReport
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.summary import PointSummary
from layerbisect.cli import main
from layerbisect.demo import Outcome, Planted
from layerbisect.kernels.judging.residuals import Fit
from layerbisect.kernels.replay.deterministic import deterministic_table
from layerbisect.kernels.replay.report import Errors, Replay, Reproduction, Result, Variation
from layerbisect.selftest import SelfTest, Setting, Tried
from layerbisect.terminal.capture import PointValues, render_points
from layerbisect.terminal.compare import render_comparison
from layerbisect.terminal.replay import render_replays
from layerbisect.terminal.routing import render_routing
from layerbisect.terminal.scores import render_scores
from layerbisect.terminal.selftest import SelfTestPage
from layerbisect.terminal.training import render_training
from layerbisect.terminal.verdict import render_verdict
from layerbisect.terminal.weights import render_weights

Page = Callable[[Console], None]
COVERED = Coverage(Points(211, ()), CoveredRows(640, 0))


@pytest.fixture(scope="module")
def demo(small_moe_dir: Path) -> Verdict:
    """A verdict on a planted fault, with layers, routing, own errors and points."""
    done = CliRunner().invoke(main, ["demo", "--model", str(small_moe_dir), "--json"])
    data = json.loads(done.stdout)
    assert data["status"] == "divergent"
    return verdict_from_json(data)


def record(offset: float) -> ScoreRecord:
    random = np.random.default_rng(1)
    calls = []
    for number in range(8):
        b = -random.exponential(1.0, 40)
        columns = {"A": b - offset, "B0": b, "B1": b, "C0": b + random.normal(0, 0.001, 40)}
        name = f"a-task-of-a-long-name/prompt-{number:05}.sample-{number % 2}"
        calls.append(Call.of(name, [1, 2], range(40), columns))
    names = ("A", "B0", "B1", "C0")
    return ScoreRecord(RecordInfo(columns={c: Scoring() for c in names}), calls)


def routing() -> Routing:
    causes = dict.fromkeys(CAUSES, 12_345)
    told = Explained(causes, 0, {"a": 0, "b": 0}, 0, 0.0061, 0.0058, (), {"a": ("mlp.norm",)})
    layers = tuple(
        LayerRouting(n, 640_000, 74_070, 1_234, 0.991, told, 4.5e-4, 0.02, 0.12, 0.0044, 0.06)
        for n in range(30)
    )
    return Routing(layers, {"same": RouteGap(400, 0.0121), "rerouted": RouteGap(38, 0.0912)})


def replay() -> Replay:
    same = Variation(0, 144, 0.0, "5 runs")
    errors = Errors(
        144, {"p50": 0.01, "max": 0.05}, 209.0, 171.0, 1.1, (), {"0": 0.74},
        (Fit("head 13 gain", 0.03, 38.4, 0.9),), "positions >= 96", 169.2, 17829, None, 0, True,
        "17829 elements lie beyond the worst-case bound",
    )  # fmt: skip
    one = Result(
        "triton-fast", "triton 3.8.0", "fast", "triton", "ran", errors=errors, repeats=same,
        batches=same, chunks=Variation(50, 144, 2.0, "halves"),
        reproduces=Reproduction(0.9999, 0.5, 1.0), time_ms=12.3,
    )  # fmt: skip
    names = ("triton-deterministic", "an-implementation-of-a-long-name (in float32)")
    others = (dataclasses.replace(one, name=name, mode="deterministic") for name in names)
    return Replay(
        "layers.9.attn.context", 9, "attention", ("linear", "norm", "rope", "attention"),
        "rollout", "bfloat16", "cuda (NVIDIA H200)", 144, 0, {"engine": "sglang"}, errors,
        (one, *others), "convicted", "a bug in its attention, not rounding",
    )  # fmt: skip


def training() -> TrainingVerdict:
    name = "layers.{}.mlp.shared_expert_gate.weights"
    points = tuple(Apart(name.format(n), 640_000, 639_999, 0.0123, 0.00456) for n in range(9))
    cause = Cause("numerics", points[0].point, None, 0.0123, (), "words of a sentence " * 9)
    again = Recomputed("full", 640_000, 211, 9, points, (cause,))
    origin = RouteOrigin(3, 640_000, 123_456, 100_000, 20_000, 3_000, 456, None)
    return TrainingVerdict(
        "divergent", None, points[0], (cause,), (origin,), again, None, points, COVERED, (),
        "look at what computes it in the training forward", ("frozen", "training"),
    )  # fmt: skip


def weights() -> WeightReport:
    names = [f"model.layers.{n}.mlp.experts.127.down_proj.weight" for n in range(9)]
    findings = tuple(
        Finding(n, "stale", "rollout", "equal to what was before " * 4, 0.0123, 0.0039, "rows 0-7")
        for n in names
    )
    covered = WeightCoverage(1_234, 5_000_000_000, 9, 1_225, 0, 0, 0, {}, {})
    return WeightReport(
        "divergent", ("rollout", "trainer"), {"rollout": "step-7"}, findings, covered, (), ()
    )


def point_values() -> list[PointValues]:
    names = ("attn.q", "mlp.expert_weights", "mlp.shared_expert.gate_logits")
    return [
        PointValues(
            PointSummary(f"layers.88.{name}", "not_observable", "", 640_000, "BF16", (128, 192), 9),
            *(-6.562, 31.75, 0.4665, 12),
        )
        for name in names
    ]


def render_selftest(demo: Verdict, out: Console) -> None:
    fault = Planted("top-k-not-renormalised", "", 93, "combine", "layers.93.mlp.out", "rollout")
    setting = Setting("transformers against transformers", "a tiny model", 94, "bfloat16", "cpu")
    runs = (
        Tried(
            Outcome(dataclasses.replace(demo, status="agree", culprits=()), None, True), 1.5, None
        ),
        Tried(Outcome(demo, fault, False), 12345.6, None),
    )
    page = SelfTestPage(out)
    page.begin(setting)
    for run in runs:
        page.tell(run)
    page.end(SelfTest(setting, runs, (), 1), None, None)


def pages(demo: Verdict) -> dict[str, Page]:
    long = dataclasses.replace(demo, labels=("decode-of-a-long-name", "prefill-of-a-long-name"))
    renamed = json.loads(
        json.dumps(demo.to_json())
        .replace('"rollout"', f'"{long.labels[0]}"')
        .replace('"trainer"', f'"{long.labels[1]}"')
    )
    scores = judge([record(0.1)])
    control = compare_runs([record(0.1)], [record(0.0)], [record(0.0)])
    pairs = deterministic_table([replay()])
    return {
        "demo": lambda out: render_verdict(demo, out),
        "demo, verbose": lambda out: render_verdict(demo, out, verbose=True),
        "long labels": lambda out: render_verdict(verdict_from_json(renamed), out, verbose=True),
        "scores": lambda out: render_scores(scores, out),
        "scores, verbose": lambda out: render_scores(scores, out, verbose=True),
        "two runs": lambda out: render_comparison(control, out),
        "routing": lambda out: render_routing(routing(), ("a", "b"), out, verbose=True),
        "replay": lambda out: render_replays([replay()], {}, out),
        "replay, verbose": lambda out: render_replays(
            [replay()], {}, out, pairs=pairs, verbose=True
        ),
        "training": lambda out: render_training(training(), out, verbose=True),
        "weights": lambda out: render_weights(weights(), out, verbose=True),
        "selftest": lambda out: render_selftest(demo, out),
        "points": lambda out: render_points(point_values(), out),
    }


NAMES = (
    "demo",
    "demo, verbose",
    "long labels",
    "scores",
    "scores, verbose",
    "two runs",
    "routing",
    "replay",
    "replay, verbose",
    "training",
    "weights",
    "selftest",
    "points",
)


def printed(page: Page, width: int, *, terminal: bool = False) -> str:
    out = io.StringIO()
    page(Console(file=out, width=width, highlight=False, force_terminal=terminal))
    return out.getvalue()


def figures(text: str) -> set[str]:
    """The numbers that stand alone."""
    found = re.findall(r"(?<![\w.\-])[+\-]?\d[\d.,]*(?:e[+\-]?\d+)?[x%]?", text)
    return {one.rstrip(".,") for one in found}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_over_but_headlines_and_commands(demo: Verdict, name: str, width: int) -> None:
    lines = printed(pages(demo)[name], width).split("\n")
    kept = [
        line
        for line in lines
        if not re.match(r"(agree|divergent|convicted|within|out of range): |    layerbisect ", line)
    ]
    assert max(len(line.rstrip()) for line in kept) <= width
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("name", NAMES)
def test_80_columns_show_the_figures_that_100_do(demo: Verdict, name: str) -> None:
    page = pages(demo)[name]
    assert figures(printed(page, 80)) == figures(printed(page, 100))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_no_escape_codes_and_no_color_no_colours(
    demo: Verdict, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = pages(demo)[name]
    assert "\x1b" not in printed(page, 80)
    monkeypatch.setenv("NO_COLOR", "1")
    codes = set(re.findall(r"\x1b\[([\d;]*)m", printed(page, 80, terminal=True)))
    # bold and dim are no colours
    assert codes <= {"0", "1", "2"}


@pytest.mark.parametrize("width", [80, 100])
def test_what_is_convicted_is_marked_without_colour(demo: Verdict, width: int) -> None:
    shown = printed(lambda out: render_verdict(demo, out), width)
    (marked,) = [line for line in shown.split("\n") if line.startswith(">")]
    assert "attn.q" in marked


def test_a_headline_wraps_in_a_terminal_and_not_in_a_file(demo: Verdict) -> None:
    page = pages(demo)["demo"]
    first = printed(page, 60).split("\n")[0]
    assert len(first) > 60 and first.endswith("(floor 1.1x)")
    assert len(printed(page, 60, terminal=True).split("\n")[0]) < len(first)
