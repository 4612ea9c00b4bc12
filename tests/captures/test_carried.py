"""What a live trainer read out, on disk."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.captures.carried import (
    BoundaryGap,
    CarriedFile,
    in_key_order,
    rows_digest,
    weights_digest,
)
from layerbisect.captures.chains import first_of_each, lay_out
from layerbisect.captures.errors import CaptureError
from layerbisect.captures.rows import KEY_DTYPE, Rows, prefix_keys

GAPS = (BoundaryGap(0, 0.0), BoundaryGap(2, 0.25), BoundaryGap(4, 1.0))
SCORES = (-1.25, None, -0.5)
FILE = CarriedFile(
    rollout="rollout",
    trainer="trainer",
    num_layers=4,
    rows="0" * 32,
    states="1" * 32,
    weights="",
    tokens=3,
    mode="search",
    forwards=4,
    gaps=GAPS,
    scores=SCORES,
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "carried.json"
    FILE.write(path)
    assert CarriedFile.read(path) == FILE
    assert [p.name for p in path.parent.iterdir()] == ["carried.json"]
    plain = json.loads(path.read_text())
    assert plain["gaps"][1] == {"boundary": 2, "gap": 0.25} and plain["schema"] == 1


@pytest.mark.parametrize(
    "gaps",
    [
        (),
        (BoundaryGap(5, 0.1),),
        (BoundaryGap(-1, 0.1),),
        (BoundaryGap(2, 0.1), BoundaryGap(2, 0.1)),
        (BoundaryGap(2, float("nan")),),
        (BoundaryGap(2, -0.1),),
    ],
)
def test_gaps_that_cannot_be_are_refused(tmp_path: Path, gaps: tuple[BoundaryGap, ...]) -> None:
    path = tmp_path / "carried.json"
    replace(FILE, gaps=gaps).write(path)
    with pytest.raises(CaptureError, match="is damaged: .* gaps at boundaries .* of 4 layers"):
        CarriedFile.read(path)


def test_scores_of_other_tokens_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "carried.json"
    replace(FILE, tokens=4).write(path)
    with pytest.raises(CaptureError, match="is damaged: 3 scores of 4 tokens"):
        CarriedFile.read(path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "carried.json"
    FILE.write(path)
    with pytest.raises(CaptureError, match="carried.json is there already, and is not overwritten"):
        replace(FILE, tokens=1, scores=(-1.0,)).write(path)
    assert CarriedFile.read(path) == FILE


def test_scores_come_in_the_order_of_their_tokens_keys() -> None:
    rows = Rows.of([0, 0, 0, 1, 1], [0, 1, 2, 0, 1], [5, 6, 7, 5, 9])
    keys = prefix_keys(rows, rows, ["", ""])
    first = first_of_each(keys)
    table = rows.take(first)
    chains = lay_out(table, keys.key[first])
    # each place has what its next token is; the shared first token counts once
    next_token = np.where(chains.target >= 0, chains.target, np.nan).astype(float)
    found = in_key_order(chains, next_token)
    assert found.tolist() == [t for t in table.token.tolist() if t != 5]


def test_weights_are_digested_by_name() -> None:
    assert weights_digest({}) == ""
    both = weights_digest({"a": "1", "b": "2"})
    assert both == weights_digest({"b": "2", "a": "1"})
    assert both not in (weights_digest({"a": "1"}), weights_digest({"a": "2", "b": "1"}))


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "is not JSON"),
        ("[]", "holds .* and not an object"),
        ('{"schema": 7}', "has schema 7"),
        ('{"schema": 1}', "lacks"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "carried.json"
    path.write_text(text)
    with pytest.raises(CaptureError, match=f"carried.json .*{why}"):
        CarriedFile.read(path)
    with pytest.raises(CaptureError, match="cannot read .*: No such file"):
        CarriedFile.read(tmp_path / "none.json")


def test_a_place_that_takes_no_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="cannot write .*carried.json: .*; name a writable"):
        FILE.write(tmp_path / "file" / "carried.json")


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), unique=True))
def test_other_keys_have_another_digest(drawn: list[tuple[int, int]]) -> None:
    keys = np.array(sorted(drawn), KEY_DTYPE)
    assert rows_digest(keys) == rows_digest(keys.copy())
    if drawn:
        assert rows_digest(keys[1:]) != rows_digest(keys)
