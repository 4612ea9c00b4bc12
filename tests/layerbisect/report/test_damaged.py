"""Results that were cut, edited or merged: one sentence that refuses them, and never a crash."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerbisect.accuracy_summary import AccuracySummary, Miss, group
from layerbisect.bisect.verdict import plain
from layerbisect.bisect.verdict_json import verdict_from_json
from layerbisect.captures.errors import LayerBisectError
from layerbisect.demo import run_demo
from layerbisect.demo_engines import NO_FAULT
from layerbisect.faults import FAULTS
from layerbisect.report.accuracy import accuracy_section
from layerbisect.report.blocks import Chart
from layerbisect.report.checked import check
from layerbisect.report.junit import junit_xml
from layerbisect.report.page import html
from layerbisect.report.replay import replay_section
from layerbisect.report.results import Result, VerdictResult, read_result
from tests.layerbisect.report.making import charts
from tests.layerbisect.report.test_selftest import ACCUSED, AGREE, DROPPED, said_of
from tests.layerbisect.test_cli_replay import replay_of

RESULTS = Path(__file__).parents[3] / "docs" / "results"
Data = dict[str, Any]
Change = Callable[[Any], object]


def read(path: Path, data: object) -> Result:
    """Read a result as the command does; raises ValueError or LayerBisectError."""
    path.write_text(json.dumps(data))
    result = read_result(path)
    check(result)
    return result


def published(name: str) -> Data:
    data: Data = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def small() -> Data:
    """The published demo with two of its sequences and three of its layers' operators."""
    data = published("demo")
    tokens = data["tokens"]
    tokens["sequences"] = tokens["sequences"][:2]
    names = {one["name"] for one in tokens["sequences"]}
    for one in tokens["heatmaps"]:
        kept = [n for n, c in enumerate(one["columns"]) if c["sequence"] in names][:12]
        one["columns"] = [one["columns"][n] for n in kept]
        for key in ("values", "worst"):
            one[key] = [[row[n] for n in kept] for row in one[key]]
    data["own_errors"] = [one for one in data["own_errors"] if one["layer"] in (None, 0, 8)]
    return data


def replays() -> Data:
    acquitted = replay_of("layers.3.mlp.out", status="acquitted")
    made = [plain(dataclasses.asdict(one)) for one in (replay_of(), acquitted)]
    return {"schema": 1, "replays": made, "left_out": {"layers.9.mlp.out": "not captured"}}


def accuracy() -> Data:
    groups = (group("tuned on", 19, 20, "kind"), group("kept", 4, 4, "kind"))
    summary = AccuracySummary("24 cases", groups, (Miss("m", "a norm", "agree"),))
    return {"schema": 1, "accuracy": plain(dataclasses.asdict(summary))}


def selftest() -> Data:
    data: Data = said_of((AGREE, None), (ACCUSED, DROPPED), (AGREE, DROPPED), captures="00/a 01/b")
    return data


BASES: dict[str, Callable[[], Data]] = {
    "verdict": small,
    "scores": lambda: published("case-1"),
    "replay": replays,
    "accuracy": accuracy,
    "selftest": selftest,
}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_published_results_are_sound(path: Path) -> None:
    check(read_result(path))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [NO_FAULT, *FAULTS])
def test_what_a_bisection_prints_is_sound(fault: str, small_moe_dir: Path) -> None:
    said = json.dumps(run_demo(fault=fault, model=small_moe_dir).to_json())
    check(VerdictResult("demo", verdict_from_json(json.loads(said))))


def every(name: str, **fields: object) -> Change:
    """Change these fields of all entries of a list."""
    return lambda data: [one.update(fields) for one in data[name]]


def heatmap(change: Change) -> Change:
    return lambda data: change(next(h for h in data["tokens"]["heatmaps"] if h["values"]))


def spread(change: Change) -> Change:
    return lambda data: change(data["tokens"]["distribution"])


def engine(change: Change) -> Change:
    return lambda data: change(data["replays"][0]["engine"])


def explained(change: Change) -> Change:
    return lambda data: change(
        next(one["explained"] for one in data["routing"]["layers"] if one["explained"])
    )


DAMAGED: list[tuple[str, Change, str]] = [
    ("verdict", lambda d: d.update(status="agree"), "culprits: sides that agree have none"),
    ("verdict", lambda d: d.update(labels=["a", "a"]), "labels: two sides have two names"),
    ("verdict", every("culprits", side="nobody"), r"culprits\[0\].side: it must be rollout or"),
    ("verdict", every("culprits", layer=-3), r"culprits\[0\].layer: it must be 0 or more, got -3"),
    ("verdict", every("own_errors", side="nobody"), r"own_errors\[0\].side: it must be rollout"),
    ("verdict", lambda d: d["gap"].update(rows=-5), "gap.rows: it must be 0 or more, got -5"),
    ("verdict", lambda d: d["gap"].update(mae=-5), "gap.mae: it must be 0 or more, got -5.0"),
    ("verdict", lambda d: d["gap"].update(mae=None), "gap.mae: it must be a finite number"),
    ("verdict", lambda d: d["gap"].update(mae=1e308), r"gap.mae: it is too large, got 1e\+308"),
    ("verdict", lambda d: d["gap"].update(mae=1e-308), r"gap.mae: it is too near 0, got 1e-308"),
    ("verdict", lambda d: d["gap"].update(mae=10**400), "gap.mae must be float"),
    ("verdict", spread(lambda s: s["edges"].pop()), "distribution.edges: it must have"),
    ("verdict", spread(lambda s: s["edges"].reverse()), r"edges\[0\]: they must rise"),
    ("verdict", spread(lambda s: s.update(counts=[0] * len(s["counts"]))), "counts: they must add"),
    ("verdict", spread(lambda s: s["counts"].__setitem__(0, 10**9)), "add up to 636 tokens"),
    ("verdict", spread(lambda s: s["counts"].__setitem__(0, -1)), "it must be 0 or more, got -1"),
    ("verdict", heatmap(lambda h: h["values"].pop()), r"values: it must have \d+, one for each"),
    ("verdict", heatmap(lambda h: h["values"][0].pop()), r"values\[0\]: it must have 12"),
    ("verdict", heatmap(lambda h: h["values"][3].__setitem__(3, -1.0)), r"values\[3\]\[3\]"),
    ("verdict", heatmap(lambda h: h["boundaries"].reverse()), "boundaries: they must rise"),
    ("verdict", heatmap(lambda h: h.update(unit="<b>")), r"unit must be .*got '<b>'"),
    (
        "verdict",
        lambda d: [h["worst"][0].__setitem__(0, 99) for h in d["tokens"]["heatmaps"] if h["worst"]],
        r"worst\[0\]\[0\]: its column has rows",
    ),
    (
        "verdict",
        lambda d: d["tokens"]["sequences"].append(d["tokens"]["sequences"][0]),
        "tokens.sequences: each must have a name of its own",
    ),
    (
        "verdict",
        lambda d: d["tokens"]["sequences"][0]["first"].pop(),
        r"sequences\[0\].first: it must have \d+, one for each token",
    ),
    ("verdict", explained(lambda e: e["causes"].pop("near tie")), "explained.causes: they are"),
    ("scores", lambda d: d["scores"].update(pairs=[]), "scores.pairs: two scores were compared"),
    ("scores", lambda d: d["scores"]["pairs"][0].update(by_position=[]), "there are positions"),
    ("replay", engine(lambda e: e.update(ratio=-1.0)), "ratio: it must be 0 or more"),
    ("replay", engine(lambda e: e.update(rows=2**60)), "engine.rows: it is too large"),
    ("accuracy", lambda d: d["accuracy"]["groups"][0].update(total=0), "a group has cases"),
    ("accuracy", lambda d: d["accuracy"]["groups"][0].update(right=21), "there are 20 cases"),
    ("accuracy", lambda d: d["accuracy"]["groups"][0].update(low=0.99), "must hold the share"),
    ("selftest", lambda d: d["tried"].clear(), "tried: the clean pair must come first"),
    ("selftest", lambda d: d.update(found=9), "found: the runs make it 1, got 9"),
    ("selftest", lambda d: d.update(passed="yes"), "passed must be bool, got 'yes'"),
    ("selftest", lambda d: d["tried"][0].update(seconds=None), r"tried\[0\].seconds: they were"),
    ("selftest", lambda d: d["tried"][1].pop("mistakes"), r"lacks \['mistakes'\]"),
]


@pytest.mark.parametrize(("base", "change", "said"), DAMAGED, ids=[said for *_, said in DAMAGED])
def test_what_no_command_prints_is_refused(
    base: str, change: Change, said: str, tmp_path: Path
) -> None:
    data = BASES[base]()
    read(tmp_path / "whole.json", data)
    change(data)
    with pytest.raises((LayerBisectError, ValueError), match=said):
        read(tmp_path / "damaged.json", data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["gap"].update(nonfinite=600), "gap.nonfinite: sides that agree have none"),
        (lambda d: d["gap"].update(rows=0), "gap.rows: sides agree on some"),
        (lambda d: d["rounding_budget"].update(predicted_gap=None), "predicted_gap: it is known"),
    ],
)
def test_an_agreement_rests_on_a_gap(change: Change, said: str, tmp_path: Path) -> None:
    data = published("clean")
    change(data)
    with pytest.raises((LayerBisectError, ValueError), match=said):
        read(tmp_path / "clean.json", data)


def test_names_in_charts_are_no_dates_and_stand_apart() -> None:
    groups = [group(name, 3, 4, "day") for name in ("2024-01-01", "2024-01-01", "12")]
    (chart,) = charts(accuracy_section(AccuracySummary("12 cases", tuple(groups), ()))).values()
    replay = replay_of()
    twice = dataclasses.replace(replay, results=(replay.results[0], replay.results[0]))
    other = charts(replay_section([twice], {}))["replay-0"]
    assert list(chart.figure.data[0].y) == ["2024-01-01", "2024-01-01 (2)", "12"]
    assert [name for name in other.figure.layout.yaxis.categoryarray if "triton" in name] == [
        "triton-fast",
        "triton-fast (2)",
    ]
    assert all(one.figure.layout.yaxis.type == "category" for one in (chart, other))


def test_a_worst_row_that_is_not_finite_is_left_out_of_the_chart() -> None:
    replay = replay_of()
    assert replay.engine is not None
    broken = dataclasses.replace(replay.engine.worst[0], ratio=float("nan"))
    judged = dataclasses.replace(replay.engine, worst=(broken, *replay.engine.worst[1:]))
    section = replay_section([dataclasses.replace(replay, engine=judged)], {})
    assert isinstance(charts(section)["replay-0"], Chart)


Place = tuple[str | int, ...]


def places(value: object, at: Place = ()) -> Iterator[Place]:
    """All places in plain data, of a list of numbers the first alone."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, one in value.items():
            yield from places(one, (*at, key))
    elif isinstance(value, list):
        numbers = value and isinstance(value[0], int | float | None)
        for number in range(min(len(value), 1 if numbers else 3)):
            yield from places(value[number], (*at, number))


def damage(data: Data, at: Sequence[Any], how: object) -> Data:
    """A copy with another value at a place; ``drop`` and ``twice`` take it out and repeat it."""
    made = copy.deepcopy(data)
    *path, last = at
    inside: Any = made
    for key in path:
        inside = inside[key]
    if how == "drop":
        del inside[last]
    elif how == "twice" and isinstance(inside, list):
        inside.insert(last, inside[last])
    else:
        inside[last] = how
    return made


HOW: tuple[Any, ...] = (
    *("drop", "twice", "text", "", None, True, -1, 0, 2, 10**400, 0.5, -0.5, 1e308, 1e-308),
    *(float("inf"), float("nan"), [], {}, [[]], ["text"], {"text": None}),
)


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_damage_is_refused_or_drawn(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 4 MB that no result changes
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")
    data = BASES[base]()

    @settings(
        max_examples=60, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(at=st.sampled_from(list(places(data))), how=st.sampled_from(HOW))
    def damaged(at: Place, how: object) -> None:
        try:
            result = read(tmp_path / "damaged.json", damage(data, at, how))
        except (LayerBisectError, ValueError) as error:
            assert str(error)
            return
        assert html([result], title="damaged")
        assert junit_xml([result])

    damaged()
