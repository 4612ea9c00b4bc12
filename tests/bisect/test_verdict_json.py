"""Verdicts are the same after they were written as JSON and read back, and are readable there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.scores.judge import judge
from layerbisect.bisect.verdict import Verdict
from layerbisect.bisect.verdict_json import verdict_from_json
from layerbisect.cli.boundary import echo_json
from tests.bisect.conftest import Clean
from tests.bisect.making import rewrite
from tests.bisect.scores.making import Columns, run


def back(verdict: Verdict) -> Verdict:
    return verdict_from_json(json.loads(json.dumps(verdict.to_json(), allow_nan=False)))


def test_a_verdict_of_a_clean_run_comes_back(clean: Clean) -> None:
    verdict = bisect(clean.rollout, clean.trainer, model=clean.model)
    assert verdict.tokens and verdict.own_errors and verdict.environments
    assert back(verdict) == verdict


def test_a_verdict_with_a_culprit_comes_back(clean: Clean, tmp_path: Path) -> None:
    faulty = clean.engines["trainer"].capture(
        tmp_path / "faulty", clean.tokens, faults=[("rope-shifted", 1)]
    )
    verdict = bisect(clean.rollout, faulty, model=clean.model)
    assert verdict.status == "divergent" and verdict.culprits
    assert back(verdict) == verdict


def test_a_verdict_of_scores_comes_back() -> None:
    def lowered(scores: Columns, _: np.random.Generator) -> Columns:
        scores["A"][1:] -= 0.1
        return scores

    verdict = judge([run(1, change=lowered)])
    assert verdict.scores is not None and verdict.culprits
    assert back(verdict) == verdict


def test_a_verdict_that_could_not_be_reached_comes_back(clean: Clean, tmp_path: Path) -> None:
    few = np.arange(144) < 5
    verdict = bisect(
        rewrite(clean.rollout, tmp_path / "few", rows=few), clean.trainer, model=clean.model
    )
    assert verdict.status == "inconclusive" and verdict.tokens is not None
    assert back(verdict) == verdict


def test_a_verdict_of_values_that_are_not_finite_comes_back(clean: Clean, tmp_path: Path) -> None:
    def broken(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if name.startswith("layers.2."):
            values = values.copy()
            values[:] = np.nan if values.dtype.kind == "f" else values
        return values

    verdict = bisect(
        rewrite(clean.rollout, tmp_path / "nan", change=broken), clean.trainer, model=clean.model
    )
    assert any(math.isnan(one.median) for one in verdict.differences)
    read = back(verdict)
    assert read.to_json() == verdict.to_json() and read.tokens == verdict.tokens


_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(_PLAIN)
def test_what_is_written_parses_to_what_it_was(value: Any) -> None:
    from click.testing import CliRunner

    with CliRunner().isolation() as (out, *_):
        echo_json(value)
        text = out.getvalue().decode()
    assert json.loads(text) == value


def test_numbers_are_on_one_line_and_all_else_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    value = {
        "a": [1, None, 2.5],
        "b": [[1, 2], [True]],
        "c": [],
        "d": {},
        "e": ["x\n\u00e9", {"f": 1}],
    }
    echo_json(value)
    assert capsys.readouterr().out == (
        '{\n  "a": [1, null, 2.5],\n  "b": [\n    [1, 2],\n    [\n      true\n    ]\n  ],\n'
        '  "c": [],\n  "d": {},\n  "e": [\n    "x\\n\u00e9",\n    {\n      "f": 1\n    }\n  ]\n}\n'
    )


def test_without_lists_of_numbers_it_is_as_json_writes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    value = {"a": {"b": "c", "1": None}, "d": ["e", {"f": [{"g": 1}]}, True], "h": {2: 3}}
    echo_json(value)
    assert capsys.readouterr().out == json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def test_what_is_not_finite_is_no_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        echo_json({"a": [float("nan")]})
