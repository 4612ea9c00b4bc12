"""What the pages say of the code is what the code is."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from layerbisect.bisect.routing_report import Routing
from layerbisect.bisect.scores.report import PositionGap, ScoreReport, TokenGap
from layerbisect.bisect.token_report import TokenReport
from layerbisect.bisect.verdict import EXIT_CODES, Verdict
from layerbisect.captures import numerics_environment, points
from layerbisect.captures.format import (
    CaptureInfo,
    PassHeader,
    PassSummary,
    PassTensors,
    PointSeen,
    RankManifest,
    SequenceInfo,
    TensorHeader,
    from_json,
)
from layerbisect.captures.forward_mode import Dropout, ForwardMode
from layerbisect.captures.passfile import DTYPES
from layerbisect.captures.record.call import RecordInfo, Scoring
from layerbisect.captures.record.stored import CallFacts
from layerbisect.captures.sglang import plugin, weight_session
from scripts import write_commands, write_decisions

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CAPTURE = (
    CaptureInfo,
    RankManifest,
    PassSummary,
    PointSeen,
    ForwardMode,
    Dropout,
    PassHeader,
    SequenceInfo,
    PassTensors,
    TensorHeader,
    RecordInfo,
    Scoring,
    CallFacts,
)
NAMES = {one.__name__: one for one in (Routing, ScoreReport, TokenReport, PositionGap, TokenGap)}


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def block(name: str, after: str) -> str:
    """The first code block behind a marker."""
    text = page(name).split(after, 1)[1]
    found = re.search(r"```\w+\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


def verdict_parts(kind: Any) -> dict[str, Any]:
    """A dataclass and all that its fields are made of, by name."""
    found = {kind.__name__: kind}
    hints = [get_type_hints(kind, localns=NAMES)[f.name] for f in dataclasses.fields(kind)]
    while hints:
        hint = hints.pop()
        hints += get_args(hint)
        if dataclasses.is_dataclass(hint) and hint.__name__ not in found:  # type: ignore[union-attr]
            found |= verdict_parts(hint)
    return found


@pytest.mark.parametrize("kind", CAPTURE, ids=lambda kind: kind.__name__)
def test_capture_format_names_every_field(kind: Any) -> None:
    text = page("capture-format.md")
    for field in dataclasses.fields(kind):
        assert f"`{field.name}`" in text, field.name


def test_capture_format_names_every_point_and_dtype() -> None:
    text = page("capture-format.md")
    for name in (*points.LAYER_DIMS, *points.MODEL_DIMS):
        assert f"{name}`" in text or f"`.{name.split('.')[-1]}`" in text, name
    assert ", ".join(DTYPES) in text


def test_its_example_is_a_description() -> None:
    example = block("capture-format.md", "## capture.json")
    info = from_json(CaptureInfo, example, Path("example"))
    assert set(json.loads(example)) == {field.name for field in dataclasses.fields(info)}


@pytest.mark.parametrize("kind", verdict_parts(Verdict).values(), ids=lambda kind: kind.__name__)
def test_verdict_page_names_every_field(kind: Any) -> None:
    text = page("verdict-json.md")
    told = text.split(f"**`{kind.__name__}`**", 1)
    # a part of one use is named in brackets, with its fields
    words = told[1].split("**`", 1)[0] if told[1:] else text.split(f"`{kind.__name__}`: ", 1)[1]
    for field in dataclasses.fields(kind):
        assert f"`{field.name}`" in words, field.name


def test_verdict_page_has_every_status_and_its_exit_code() -> None:
    for status, code in EXIT_CODES.items():
        assert f"| `{status}` | {code} |" in page("verdict-json.md")


def test_mi355x_names_variables_that_captures_record() -> None:
    known = {one.name for one in numerics_environment.VARIABLES}
    table = page("mi355x.md").split("## Variables that change numbers", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert named and named <= known


def test_sglang_names_the_plugins_variables() -> None:
    for name in (plugin.DIRECTORY, weight_session.DIRECTORY, weight_session.FORM):
        assert f"| `{name}` |" in page("engines/sglang.md")


@pytest.mark.parametrize("columns", ["40", "200"])
def test_commands_are_up_to_date_at_any_width(columns: str) -> None:
    done = subprocess.run(
        [sys.executable, write_commands.__file__, "--check"],
        env=os.environ | {"COLUMNS": columns, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_changed_help_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "commands.md"
    old.write_text(write_commands.page().replace("Usage:", "Use:", 1))
    monkeypatch.setattr(write_commands, "PAGE", old)
    assert write_commands.main(["--check"]) == 1
    assert write_commands.main([]) == 0
    assert write_commands.main(["--check"]) == 0


def test_figures_of_the_tests_are_up_to_date() -> None:
    assert write_decisions.main(["--check"]) == 0


def test_clean_runs_that_are_drawn_accuse_nobody() -> None:
    assert "culprits named: 0" in write_decisions.drawn(20)
    assert "culprits named: 0" in page("decides.md")


def test_most_wrong_that_still_fits_a_count() -> None:
    # the rule of three, and what always fits
    assert write_decisions.upper(0, 300) == "1.0 %"
    assert write_decisions.upper(2, 2) == "100.0 %"
