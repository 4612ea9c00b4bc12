"""Writing and reading captures, and what is said of a bad one."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import CaptureInfo, PointSeen, SequenceInfo, TensorHeader
from layerbisect.captures.rows import Rows
from layerbisect.captures.store import Capture
from layerbisect.captures.writer import CaptureWriter, Scores

POINT = "layers.0.input"
HIDDEN = TensorHeader(("row", "hidden"))
DTYPES = {
    torch.bfloat16: np.float32,
    torch.float16: np.float32,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
}

WriteCapture = Callable[..., Path]


def one_pass(
    writer: CaptureWriter,
    value: torch.Tensor,
    *,
    start: int = 0,
    name: str = "s",
    salt: str = "",
    **changes: Any,
) -> Rows:
    """Write a pass of one sequence whose tokens are their positions, and return its rows."""
    count = len(value)
    rows = Rows.of([0] * count, range(start, start + count), range(start, start + count))
    writer.write_pass(
        "forward", [SequenceInfo(name, salt)], rows, {POINT: value}, {POINT: HIDDEN}, **changes
    )
    return rows


@given(st.data())
@settings(max_examples=40)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(
    dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory, info: CaptureInfo, data: Any
) -> None:
    """Several passes of several sequences over ranks that shard heads: any rows read back."""
    directory = tmp_path_factory.mktemp("round") / "trip"
    world, heads, passes = (data.draw(st.integers(1, n)) for n in (3, 2, 4))
    shape = (world * heads, 3)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    writers = [CaptureWriter(directory, info, rank=rank, world_size=world) for rank in range(world)]
    expected, tables = [], []
    for number in range(passes):
        lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
        names = [SequenceInfo(f"s{i}") for i in range(len(lengths))]
        rows = Rows.of(
            [i for i, n in enumerate(lengths) for _ in range(n)],
            [number * 3 + p for n in lengths for p in range(n)],
            random.integers(0, 9, sum(lengths)),
        )
        bits = torch.from_numpy(random.standard_normal((len(rows), *shape)) * 1e3)
        value = bits.to(dtype)
        for rank, writer in enumerate(writers):
            a, b = rank * heads, (rank + 1) * heads
            header = TensorHeader(("row", "head", "channel"), {"head": (a, b, shape[0])})
            point = "layers.0.attn.context"
            writer.write_pass("prefill", names, rows, {point: value[:, a:b]}, {point: header})
        tables.append(rows)
        expected.append(value.to(torch.float32) if dtype.itemsize == 2 else value)
    for writer in writers:
        writer.finish()
    whole = torch.cat(expected).numpy()
    if not len(whole):
        with pytest.raises(CaptureError):
            Capture.open(directory)
        return
    capture = Capture.open(directory)
    assert capture.finished and not capture.problems
    rows = Rows.concatenate(tables)
    np.testing.assert_array_equal(capture.rows.position, rows.position)
    np.testing.assert_array_equal(capture.rows.token, rows.token)
    got_names = [capture.sequences[n].name for n in capture.rows.sequence]
    assert got_names == [f"s{n}" for n in rows.sequence]
    got = capture.read("layers.0.attn.context")
    assert got.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(got, whole)
    index = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1)))
    np.testing.assert_array_equal(capture.read("layers.0.attn.context", index), whole[index])
    assert not capture.replica_findings


def test_non_finite_values_are_kept(tmp_path: Path, info: CaptureInfo) -> None:
    special = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0, 1e-40]])
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        writer = CaptureWriter(tmp_path / str(dtype), info)
        one_pass(writer, special.to(dtype))
        writer.finish()
        got = Capture.open(tmp_path / str(dtype)).read(POINT)
        expected = special.to(dtype).double().numpy()
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(np.signbit(got[0, 3:]), np.signbit(expected[0, 3:]))


def test_partial_sums_over_ranks_are_added(tmp_path: Path, info: CaptureInfo) -> None:
    parts = [torch.randn(4, 6).bfloat16() for _ in range(2)]
    for rank, part in enumerate(parts):
        writer = CaptureWriter(tmp_path / "c", info, rank=rank, world_size=2)
        rows = Rows.of([0] * 4, range(4), range(4))
        header = TensorHeader(("row", "hidden"), partial_sum=(rank, 2), how="partial_sum")
        writer.write_pass("forward", [SequenceInfo("s")], rows, {POINT: part}, {POINT: header})
        writer.finish()
    capture = Capture.open(tmp_path / "c")
    expected = (parts[0].float() + parts[1].float()).bfloat16().float()
    np.testing.assert_array_equal(capture.read(POINT), expected.numpy())
    np.testing.assert_array_equal(capture.read(POINT, np.array([2])), expected.numpy()[[2]])
    assert capture.points[POINT] == PointSeen("partial_sum")


def test_rows_may_be_in_another_order_or_apart_on_each_rank(
    tmp_path: Path, info: CaptureInfo
) -> None:
    """As in context parallelism; one position both ranks hold, in different places."""
    value = torch.randn(6, 4)
    orders = [[0, 5, 1], [1, 0, 5]], [[0, 5, 1], [2, 4, 3]]
    for number, ranks in enumerate(orders):
        directory = tmp_path / str(number)
        for rank, order in enumerate(ranks):
            writer = CaptureWriter(directory, info, rank=rank, world_size=2)
            rows = Rows.of([0] * 3, order, [10 + p for p in order])
            writer.write_pass(
                "forward", [SequenceInfo("s")], rows, {POINT: value[order]}, {POINT: HIDDEN}
            )
            writer.finish()
        capture = Capture.open(directory)
        np.testing.assert_array_equal(
            capture.read(POINT), value.numpy()[capture.rows.position.astype(int)]
        )
        assert sorted(capture.rows.position) == sorted({p for order in ranks for p in order})
        assert capture.replica_findings == {}


def test_replicas_that_disagree_are_a_finding(tmp_path: Path, info: CaptureInfo) -> None:
    for rank in range(2):
        writer = CaptureWriter(tmp_path / "c", info, rank=rank, world_size=2)
        one_pass(writer, torch.full((2, 3), float(rank)))
        writer.finish()
    capture = Capture.open(tmp_path / "c")
    np.testing.assert_array_equal(capture.read(POINT), np.zeros((2, 3)))
    assert "rank-1 differs in 6 values" in capture.replica_findings[POINT]


def test_ranks_that_hold_different_tokens_are_refused(tmp_path: Path, info: CaptureInfo) -> None:
    for rank in range(2):
        writer = CaptureWriter(tmp_path / "c", info, rank=rank, world_size=2)
        rows = Rows.of([0], [0], [7 + rank])
        writer.write_pass("forward", [SequenceInfo("s")], rows, {}, {})
        writer.finish()
    with pytest.raises(CaptureError, match="sequence 's' holds two tokens at position 0: 7 and 8"):
        Capture.open(tmp_path / "c")


def test_context_and_scores(tmp_path: Path, info: CaptureInfo) -> None:
    writer = CaptureWriter(tmp_path / "c", info)
    rows = Rows.of([0, 0], [2, 3], [7, 8])
    scored = Rows.of([0, 0], [3, 4], [8, 9])
    writer.write_pass(
        "prefill",
        [SequenceInfo("s")],
        rows,
        {},
        {},
        scores=Scores(scored, np.array([-1.5, -2.5], np.float32)),
        context=Rows.of([0, 0], [0, 1], [5, 6]),
    )
    capture = Capture.open(tmp_path / "c")
    assert capture.keys.known.all() and capture.scores.keys.known.all()
    np.testing.assert_array_equal(capture.scores.logprob, [-1.5, -2.5])
    assert capture.scores.logprob.dtype == np.float64
    np.testing.assert_array_equal(capture.scores.rows.token, [8, 9])
    assert capture.keys.key[1] == capture.scores.keys.key[0]


def test_requests_choose_sequences(write_capture: WriteCapture) -> None:
    directory = write_capture(sequences=12, steps=1)
    whole = Capture.open(directory)
    some = Capture.open(directory, requests="s1*", label="replay")
    assert [s.name for s in some.sequences] == ["s1", "s10", "s11"]
    assert some.label == "replay" and some.labelled("x").label == "x"
    chosen = np.isin(whole.rows.sequence, [1, 10, 11])
    np.testing.assert_array_equal(some.read(POINT), whole.read(POINT, chosen))
    np.testing.assert_array_equal(some.scores.logprob, whole.scores.logprob[chosen])
    np.testing.assert_array_equal(some.keys.key, whole.keys.key[chosen])
    with pytest.raises(CaptureError, match="matches 'nobody'; it has 12 sequences, such as"):
        Capture.open(directory, requests="nobody")


def test_rows_that_are_not_there_are_refused(write_capture: WriteCapture) -> None:
    capture = Capture.open(write_capture())
    for index in ([-1], [0, len(capture.rows)]):
        with pytest.raises(IndexError, match=f"rows 0 to {len(capture.rows) - 1}"):
            capture.read(POINT, np.array(index))
    with pytest.raises(CaptureError, match="no rows of"):
        capture.read(POINT, np.zeros(len(capture.rows), bool))


def test_a_point_of_some_passes_alone(tmp_path: Path, info: CaptureInfo) -> None:
    writer = CaptureWriter(tmp_path / "c", info)
    one_pass(writer, torch.ones(2, 3))
    writer.write_pass("decode", [SequenceInfo("s")], Rows.of([0], [2], [2]), {}, {})
    writer.finish()
    capture = Capture.open(tmp_path / "c")
    np.testing.assert_array_equal(capture.has(POINT), [True, True, False])
    assert capture.read(POINT, np.array([1])).shape == (1, 3)
    assert list(capture.phases) == ["forward", "forward", "decode"]
    with pytest.raises(CaptureError, match=f"not hold {POINT} for 1 of its 3 rows; capture it"):
        capture.read(POINT)
    with pytest.raises(CaptureError, match="does not hold layers.1.mid for 3 of its 3 rows"):
        capture.read("layers.1.mid")


def test_a_shape_that_changes_between_passes_is_refused(tmp_path: Path, info: CaptureInfo) -> None:
    writer = CaptureWriter(tmp_path / "c", info)
    one_pass(writer, torch.ones(2, 3))
    one_pass(writer, torch.ones(2, 4), start=2)
    with pytest.raises(CaptureError, match=r"is float32 \[3\] in one pass and float32 \[4\] in an"):
        Capture.open(tmp_path / "c").read(POINT)


def test_one_name_for_two_sequences_is_refused(tmp_path: Path, info: CaptureInfo) -> None:
    writer = CaptureWriter(tmp_path / "salt", info)
    one_pass(writer, torch.ones(2, 3))
    one_pass(writer, torch.ones(2, 3), salt="adapter")
    with pytest.raises(CaptureError, match="gives sequence 's' another scoring context"):
        Capture.open(tmp_path / "salt")
    writer = CaptureWriter(tmp_path / "token", info)
    for token in (4, 5):
        writer.write_pass("forward", [SequenceInfo("s")], Rows.of([0], [0], [token]), {}, {})
    with pytest.raises(CaptureError, match="token: sequence 's' holds two tokens at position 0"):
        Capture.open(tmp_path / "token")


# what the writer refuses


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"value": torch.ones(2, 3)}, r"shape \[2, 3\] does not fit \[row=1, hidden=any\]"),
        ({"value": torch.ones(1, 3, 1)}, r"shape \[1, 3, 1\] does not fit"),
        ({"value": torch.ones(1, 3).to(torch.complex64)}, "torch.complex64, which a capture can"),
        ({"value": torch.ones(1, 3).to(torch.float8_e4m3fn)}, "torch.float8_e4m3fn"),
        ({"sequences": []}, "rows name sequence 0, which is none"),
        ({"scores": Scores(Rows.of([0], [1], [2]), np.empty(0))}, "0 scores for 1 tokens"),
        ({"scores": Scores(Rows.of([3], [1], [2]), np.empty(1))}, "scores name sequence 3"),
        ({"context": Rows.of([3], [1], [2])}, "context name sequence 3"),
    ],
)
def test_a_pass_that_could_not_be_read_is_not_written(
    tmp_path: Path, info: CaptureInfo, change: Mapping[str, Any], sentence: str
) -> None:
    writer = CaptureWriter(tmp_path / "c", info)
    values = {"value": torch.ones(1, 3), "sequences": [SequenceInfo("s")], **change}
    tensors = {POINT: values.pop("value")}
    with pytest.raises(CaptureError, match=sentence):
        writer.write_pass(
            "forward",
            values.pop("sequences"),
            Rows.of([0], [0], [0]),
            tensors,
            {POINT: HIDDEN},
            **values,
        )
    assert sorted(p.name for p in (tmp_path / "c" / "rank-0").iterdir()) == ["manifest.json"]


def test_a_pass_that_failed_leaves_its_number_free(tmp_path: Path, info: CaptureInfo) -> None:
    """So that the other passes still have the same number on all ranks."""
    for rank in range(2):
        writer = CaptureWriter(tmp_path / "c", info, rank=rank, world_size=2)
        one_pass(writer, torch.zeros(1, 3))
        if rank:
            with pytest.raises(CaptureError):
                one_pass(writer, torch.zeros(1), start=1)
        else:
            one_pass(writer, torch.zeros(1, 3), start=1)
        one_pass(writer, torch.zeros(1, 3), start=2)
        writer.finish()
    capture = Capture.open(tmp_path / "c")
    assert list(capture.rows.position) == [0, 2]
    assert not capture.finished
    assert capture.problems == (
        "1 passes are not on every rank and are left out, pass 1 first, which rank 1 did not write",
    )
    assert capture.replica_findings == {} and capture.read(POINT).shape == (2, 3)
    np.testing.assert_array_equal(capture.keys.known, [True, False])


def test_a_full_disk_leaves_no_temporary_file(
    tmp_path: Path, info: CaptureInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CaptureWriter(tmp_path / "c", info)
    one_pass(writer, torch.zeros(1, 3))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(CaptureError, match="No space left on device"):
        one_pass(writer, torch.zeros(1, 3), start=1)
    with pytest.raises(CaptureError, match="cannot write .*No space left"):
        CaptureWriter(tmp_path / "d", info)
    monkeypatch.undo()
    writer.finish()
    assert sorted(p.name for p in (tmp_path / "c" / "rank-0").iterdir()) == [
        "manifest.json",
        "pass-000000.safetensors",
    ]
    assert list((tmp_path / "d").iterdir()) == []
    assert len(Capture.open(tmp_path / "c").rows) == 1


def test_a_finished_capture_takes_no_more(tmp_path: Path, info: CaptureInfo) -> None:
    writer = CaptureWriter(tmp_path / "c", info)
    one_pass(writer, torch.zeros(1, 3))
    writer.finish()
    with pytest.raises(CaptureError, match="is finished, and takes no further pass"):
        one_pass(writer, torch.zeros(1, 3), start=1)


def snapshot(directory: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("finish", [True, False])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_a_second_writer_refuses_and_leaves_the_first_intact(
    write_capture: WriteCapture, info: CaptureInfo, rank: int, world_size: int, finish: bool
) -> None:
    directory = write_capture(finish=finish)
    before = snapshot(directory)
    with pytest.raises(CaptureError, match="already holds a capture; name another directory or"):
        CaptureWriter(directory, info, rank=rank, world_size=world_size)
    assert snapshot(directory) == before


def test_two_writers_of_one_rank(tmp_path: Path, info: CaptureInfo) -> None:
    CaptureWriter(tmp_path / "c", info, rank=1, world_size=2)
    with pytest.raises(CaptureError, match="rank-1 is there already; name another directory"):
        CaptureWriter(tmp_path / "c", info, rank=1, world_size=2)
    CaptureWriter(tmp_path / "c", info, rank=0, world_size=2)


def test_foreign_files_and_files_in_the_way_are_refused(tmp_path: Path, info: CaptureInfo) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CaptureError, match=r"holds other files \('notes.txt'\); name an empty"):
        CaptureWriter(tmp_path, info)
    with pytest.raises(CaptureError, match="notes.txt is a file; name a directory"):
        CaptureWriter(tmp_path / "notes.txt", info)
    with pytest.raises(CaptureError, match="Not a directory; name a writable directory"):
        CaptureWriter(tmp_path / "notes.txt" / "deep", info)
    assert snapshot(tmp_path) == {tmp_path / "notes.txt": b"mine"}
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".hidden").touch()
    CaptureWriter(tmp_path / "empty", info)


def test_unwritable_directory(tmp_path: Path, info: CaptureInfo, monkeypatch: Any) -> None:
    # root may write anywhere, so that permission bits alone do not show it
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CaptureError, match="rank-0: Permission denied; name a writable directory"):
        CaptureWriter(tmp_path / "c", info)
    assert not (tmp_path / "c").exists()


def test_a_description_that_is_no_json_makes_no_directory(
    tmp_path: Path, info: CaptureInfo
) -> None:
    with pytest.raises(CaptureError, match="cannot be JSON: .*dtype"):
        CaptureWriter(tmp_path / "c", replace(info, model_config={"dtype": torch.bfloat16}))
    assert not (tmp_path / "c").exists()


def test_any_name_of_a_sequence_survives(tmp_path: Path, info: CaptureInfo) -> None:
    names = ["ключ", "\ud800", "a\nb", '"', "a" * 5000, ""]
    writer = CaptureWriter(tmp_path / "c", replace(info, label="сторона"))
    for name in names:
        one_pass(writer, torch.ones(1, 2), name=name)
    capture = Capture.open(tmp_path / "c")
    assert [s.name for s in capture.sequences] == names
    assert capture.label == "сторона"


def test_a_pass_is_an_ordinary_safetensors_file(tmp_path: Path, info: CaptureInfo) -> None:
    writer = CaptureWriter(tmp_path / "c", info)
    tensors = {
        f"layers.{i}.input": (torch.randn(4, 6) * 9).to(dtype).t().contiguous().t()[1:3]
        for i, dtype in enumerate([torch.bool, *DTYPES, torch.uint8, torch.int16, torch.int8])
    }
    tensors["final_norm"] = torch.empty(2, 0)
    tensors["embed"] = tensors["final_norm"]
    rows = Rows.of([0, 0], [0, 1], [3, 4])
    headers = dict.fromkeys(tensors, HIDDEN)
    writer.write_pass("forward", [SequenceInfo("ключ")], rows, tensors, headers)
    path = tmp_path / "c" / "rank-0" / "pass-000000.safetensors"
    with safe_open(path, "pt") as file:
        assert set(file.metadata()) == {"layerbisect", "layerbisect.tensors"}
        for name, value in tensors.items():
            got = file.get_tensor(name)
            assert got.dtype == value.dtype and torch.equal(got, value)
    capture = Capture.open(tmp_path / "c")
    for name, value in tensors.items():
        np.testing.assert_array_equal(capture.read(name), value.to(torch.float64).numpy())


# reading needs little


def test_reading_needs_numpy_alone(write_capture: WriteCapture) -> None:
    directory = write_capture(ranks=2)
    program = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors", "transformers", "sglang", "triton"):
            raise ImportError(f"{{name}} was imported")
sys.meta_path.insert(0, Block())
from layerbisect.captures.store import Capture
from layerbisect.captures.summary import summarize
capture = Capture.open({str(directory)!r})
print(capture.read({POINT!r}).sum(), summarize(capture).rows)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    total, rows = done.stdout.split()
    assert float(total) == Capture.open(directory).read(POINT).sum()
    assert int(rows) == len(Capture.open(directory).rows)


def test_reading_a_point_does_not_read_the_others(tmp_path: Path, info: CaptureInfo) -> None:
    hidden, count = 1 << 15, 16
    names = [f"layers.{i}.input" for i in range(count)]
    writer = CaptureWriter(tmp_path / "c", replace(info, num_layers=count))
    rows = Rows.of([0] * 8, range(8), range(8))
    writer.write_pass(
        "forward",
        [SequenceInfo("s")],
        rows,
        {n: torch.full((8, hidden), float(i)) for i, n in enumerate(names)},
        dict.fromkeys(names, HIDDEN),
    )
    size = 4 * 8 * hidden
    tracemalloc.start()
    capture = Capture.open(tmp_path / "c")
    opened = tracemalloc.get_traced_memory()[1]
    assert opened < size // 2
    tracemalloc.reset_peak()
    assert capture.read("layers.3.input").mean() == 3
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - opened < 3 * size
    tracemalloc.start()
    capture.read("layers.3.input", np.array([5]))
    assert tracemalloc.get_traced_memory()[1] < size
    tracemalloc.stop()


def test_opening_and_reading_take_time_in_proportion_to_the_passes(
    tmp_path: Path, info: CaptureInfo
) -> None:
    """Counts calls, for a clock would not repeat: nothing may be quadratic in decode steps."""
    calls = []
    for steps in (20, 40, 80):
        directory = tmp_path / str(steps)
        writer = CaptureWriter(directory, info)
        for step in range(steps):
            one_pass(writer, torch.zeros(1, 2), start=step)
        writer.finish()
        count = 0

        def profile(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(profile)
        Capture.open(directory).read(POINT)
        sys.setprofile(None)
        calls.append(count)
    first, second = calls[1] - calls[0], calls[2] - calls[1]
    assert second <= 2.2 * first
