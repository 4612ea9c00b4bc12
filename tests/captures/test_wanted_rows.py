"""Choosing by another capture which sequences of a batch are recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.format import CaptureInfo, SequenceInfo
from layerbisect.captures.rows import Rows
from layerbisect.captures.store import Capture
from layerbisect.captures.wanted_rows import WantedSequences
from layerbisect.captures.writer import CaptureWriter


def rows_of(*sequences: list[int], start: int = 0) -> Rows:
    lengths = [len(ids) for ids in sequences]
    return Rows.of(
        np.repeat(np.arange(len(sequences)), lengths),
        np.concatenate([np.arange(start, start + n) for n in lengths]),
        np.concatenate([np.array(ids) for ids in sequences]),
    )


def capture_of(folder: Path, info: CaptureInfo, rows: Rows, salt: str = "") -> Capture:
    writer = CaptureWriter(folder, info)
    count = int(rows.sequence.max()) + 1
    writer.write_pass("forward", [SequenceInfo(f"s{i}", salt) for i in range(count)], rows, {}, {})
    writer.finish()
    return Capture.open(folder)


def test_sequences_that_go_on_from_or_end_within_one_of_the_capture_are_chosen(
    tmp_path: Path, info: CaptureInfo
) -> None:
    held = capture_of(tmp_path / "c", info, rows_of([1, 2, 3, 4], [1, 9, 9]))
    wanted = WantedSequences(held)
    batch = rows_of(
        [1, 2, 3, 4],
        # padded on the right, as a job does
        [1, 2, 3, 4, 0, 0],
        # cut short
        [1, 2, 3],
        # the first tokens in common are no reason
        [1, 2, 3, 5],
        [7, 1, 2, 3, 4],
        [1, 9, 9, 9],
    )
    assert wanted.chosen(batch, [""] * 6).tolist() == [True, True, True, False, False, True]
    assert not wanted.chosen(batch, ["an adapter"] * 6).any()


def test_a_batch_without_rows_and_rows_without_their_start_are_not_chosen(
    tmp_path: Path, info: CaptureInfo
) -> None:
    wanted = WantedSequences(capture_of(tmp_path / "c", info, rows_of([1, 2, 3])))
    assert wanted.chosen(Rows.empty(), []).tolist() == []
    assert wanted.chosen(rows_of([2, 3], start=1), [""]).tolist() == [False]


def test_where_no_sequence_is_wanted_the_first_difference_is_said(
    tmp_path: Path, info: CaptureInfo
) -> None:
    wanted = WantedSequences(capture_of(tmp_path / "c", info, rows_of([1, 2, 3], [7, 7])))
    assert wanted.none_of(5, rows_of([1, 4, 3])).startswith(
        f"5 sequences were seen and none is in {tmp_path / 'c'}: at position 1 the first seen has "
        "token 4, and the first there 2; "
    )
    # another salt, say
    assert wanted.none_of(1, rows_of([1, 2, 3])).startswith(
        f"1 sequences were seen and none is in {tmp_path / 'c'}; "
    )


def test_a_capture_without_whole_sequences_is_refused(tmp_path: Path, info: CaptureInfo) -> None:
    held = capture_of(tmp_path / "c", info, rows_of([2, 3], start=1))
    with pytest.raises(LayerBisectError, match="no sequence from its start"):
        WantedSequences(held)
