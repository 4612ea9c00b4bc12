"""The record of scores: what is written comes back to the bit, and what lies is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.captures.errors import RecordError
from layerbisect.captures.record.call import Call, RecordInfo, Scoring, replays
from layerbisect.captures.record.file import ScoreRecord, open_all

SCORE = st.floats(-1e4, 0, allow_subnormal=False)


def record(*calls: Call) -> ScoreRecord:
    columns = {column: Scoring(worker="w") for column in calls[0].scores}
    return ScoreRecord(RecordInfo(model="m", step=3, columns=columns), calls)


@st.composite
def calls(draw: st.DrawFn) -> list[Call]:
    columns = draw(st.sets(st.sampled_from(["A", "B0", "B1", "C0", "C.grad", "B0.logit"])))
    made = []
    for number in range(draw(st.integers(1, 4))):
        asked, given_ = draw(st.integers(1, 5)), draw(st.integers(1, 6))
        mask = draw(st.lists(st.booleans(), min_size=given_, max_size=given_))
        scores = {}
        for column in columns:
            values = np.array(draw(st.lists(SCORE, min_size=given_, max_size=given_)))
            if draw(st.booleans()):
                # as an engine in single precision returns them
                values = values.astype(np.float32).astype(np.float64)
            if draw(st.booleans()):
                values[~np.array(mask)] = np.nan
            scores[column] = values
        total = asked + given_
        made.append(
            Call.of(
                f"call-{number}",
                draw(st.lists(st.integers(0, 2**40), min_size=asked, max_size=asked)),
                draw(st.lists(st.integers(0, 9), min_size=given_, max_size=given_)),
                scores,
                mask=mask,
                positions=draw(st.none() | st.permutations(range(total))),
                starts=draw(st.sampled_from([None, [0, total - 1]])),
                turn=draw(st.integers(0, 3)),
                cached=draw(st.sampled_from([{}, {"B0": 1}])),
                context={"adapter": "é"},
            )
        )
    return made


@given(calls=calls())
def test_what_is_written_comes_back(
    calls: list[Call], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("record") / "r.safetensors"
    written = record(*calls)
    written.save(path)
    read = ScoreRecord.open(path)
    assert read.info == written.info and read.names == written.names
    for one, other in zip(read, written, strict=True):
        for part in ("prompt", "response", "mask", "positions", "starts"):
            assert np.array_equal(getattr(one, part), getattr(other, part))
        assert one.scores.keys() == other.scores.keys()
        for column, values in one.scores.items():
            assert np.array_equal(values, other.scores[column], equal_nan=True)
        assert (one.turn, one.group, one.cached, one.context) == (
            other.turn,
            other.group,
            other.cached,
            other.context,
        )


def simple(name: str = "one", **more: Any) -> Call:
    return Call.of(name, [1, 2], [3, 4], {"A": [-0.5, -1.5]}, **more)


def test_columns_are_added_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    first = record(simple())
    first.save(path)
    second = first.with_column("B0", {"one": [-0.25, -1.0]}, Scoring(), cached={"one": 0})
    second.save(path)
    opened = ScoreRecord.open(path)
    assert opened.columns == ("A", "B0") and opened[0].cached == {"B0": 0}
    with pytest.raises(RecordError, match="column A already"):
        second.with_column("A", {"one": [-0.25, -1.0]}, Scoring())
    before = path.read_bytes()
    changed = record(Call.of("one", [1, 2], [3, 4], {"A": [-0.6, -1.5]}))
    for other in (changed, first, record(simple("two")), record(simple(mask=[1, 0]))):
        with pytest.raises(RecordError, match="never overwritten"):
            other.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(scores={"A": [-1.0]}), "1 scores in A for 2 response tokens"),
        (dict(scores={"A": [-1.0, float("nan")]}), "score nan in A at response position 1"),
        (dict(scores={"A": [float("-inf"), -1.0]}, mask=[0, 1]), "score -inf in A"),
        (dict(scores={"A": [-1e30, -1.0]}), "score -1e\\+30 in A"),
        (dict(scores={"A": ["x", "y"]}), "give one row of scores"),
        (dict(scores={"D": [-1.0, -1.0]}), "a column 'D'"),
        (dict(mask=[1, 2]), "mask value 2 at response position 1"),
        (dict(mask=[1]), "a mask of 1 values for 2"),
        (dict(prompt=[]), "0 prompt tokens"),
        (dict(prompt=[1.0]), "as integers"),
        (dict(response=[3, -4]), "token ID -4 at response position 1"),
        (dict(positions=[0, 1, 2]), "3 positions for 4 tokens"),
        (dict(starts=[1]), "give 0 first"),
        (dict(starts=[0, 4]), "give 0 first"),
        (dict(cached={"A": 5}), "5 cached tokens of 4 in A"),
    ],
)
def test_a_call_that_lies_is_refused(arguments: dict[str, Any], message: str) -> None:
    plain: dict[str, Any] = dict(prompt=[1, 2], response=[3, 4], scores={"A": [-0.5, -1.5]})
    with pytest.raises(RecordError, match=message):
        Call.of("one", **(plain | arguments))


def test_a_token_that_the_mask_leaves_out_needs_no_score() -> None:
    call = Call.of("one", [1], [2, 3], {"A": [-1.0, float("nan")]}, mask=[1, 0])
    assert np.isnan(call.scores["A"][1])


def test_records_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no call"):
        ScoreRecord(RecordInfo(), [])
    with pytest.raises(RecordError, match="two calls named 'one'"):
        record(simple(), simple())
    with pytest.raises(RecordError, match="differ in column B0"):
        ScoreRecord(RecordInfo(columns={"A": Scoring(), "B0": Scoring()}), [simple()])
    with pytest.raises(RecordError, match="there is no record"):
        ScoreRecord.open(tmp_path / "none.safetensors")
    with pytest.raises(RecordError, match="is a directory"):
        ScoreRecord.open(tmp_path)
    with pytest.raises(RecordError, match="there is no record; name a file"):
        open_all([tmp_path])
    text = tmp_path / "text.safetensors"
    text.write_text("no tensors here, only text")
    with pytest.raises(RecordError, match="no whole safetensors file"):
        ScoreRecord.open(text)
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(RecordError, match="no record of scores"):
        ScoreRecord.open(tmp_path / "other.safetensors")


def test_a_file_cut_off_or_changed_is_refused(tmp_path: Path) -> None:
    path = record(simple(), simple("two")).save(tmp_path / "r.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(RecordError, match="no whole safetensors file"):
        ScoreRecord.open(path)
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    # the mask is stored a byte a token
    start, stop = header["mask"]["data_offsets"]
    data = 8 + length
    path.write_bytes(whole[: data + start] + b"\x07" * (stop - start) + whole[data + stop :])
    with pytest.raises(RecordError, match="mask is not what was written"):
        ScoreRecord.open(path)
    scores = header["scores.A"]["data_offsets"][0]
    changed = bytearray(whole)
    changed[data + scores] ^= 1
    path.write_bytes(changed)
    with pytest.raises(RecordError, match="scores.A is not what was written"):
        ScoreRecord.open(path)


def test_what_took_the_place_of_a_record_is_not_read_for_it(tmp_path: Path) -> None:
    path = record(simple(), simple("two")).save(tmp_path / "r.safetensors")
    opened = ScoreRecord.open(path)
    opened.with_column("B0", {"one": [-0.1, -0.2], "two": [-0.3, -0.4]}, Scoring()).save(path)
    with pytest.raises(RecordError, match="written anew after it was opened"):
        opened[0]
    assert ScoreRecord.open(path).columns == ("A", "B0")


def test_a_directory_stands_for_its_records(tmp_path: Path) -> None:
    record(simple("two")).save(tmp_path / "1.safetensors")
    record(simple()).save(tmp_path / "0.safetensors")
    assert [r.names for r in open_all([tmp_path])] == [("one",), ("two",)]


def test_repeats_come_by_number() -> None:
    assert replays(("B10", "B2", "A", "B2.logit", "C0"), "B") == ("B2", "B10")


def test_a_record_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(simple()).save(tmp_path / "r.safetensors")
    before = path.read_bytes()

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    wider = record(simple()).with_column("B0", {"one": [-0.25, -1.0]}, Scoring())
    with pytest.raises(RecordError, match="No space left on device; what it held is kept"):
        wider.save(path)
    with pytest.raises(RecordError, match="cannot write .*No space left on device$"):
        wider.save(tmp_path / "other.safetensors")
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_others_may_read_a_record(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    path = record(simple()).save(tmp_path / "r.safetensors")
    assert path.stat().st_mode == plain.stat().st_mode
