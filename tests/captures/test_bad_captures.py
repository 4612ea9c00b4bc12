"""Damaged, foreign and incomplete captures: one clear sentence each, naming the file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.store import Capture

POINT = "layers.0.input"
FIRST = "pass-000000.safetensors"
WriteCapture = Callable[..., Path]


def refused(directory: Path, read: bool = True) -> str:
    """Open and read a capture that must be refused, and return the sentence that says why."""
    with pytest.raises(CaptureError) as caught:
        capture = Capture.open(directory)
        if read:
            capture.read(POINT)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert str(directory) in sentence
    return sentence


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a pass file's header, keeping the data."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    # metadata first and no spaces, as safetensors has it
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def edit_record(path: Path, key: str, change: Callable[[Any], Any]) -> None:
    """Change one of the records in a pass file's metadata."""

    def changed(header: dict[str, Any]) -> None:
        record = json.loads(header["__metadata__"][key])
        change(record)
        header["__metadata__"][key] = json.dumps(record)

    edit_header(path, changed)


def test_no_capture_there(tmp_path: Path) -> None:
    assert "holds no capture (no capture.json); make one with" in refused(tmp_path / "none")
    assert "holds no capture" in refused(tmp_path)
    (tmp_path / "file").touch()
    assert "holds no capture" in refused(tmp_path / "file")


def test_empty_captures(write_capture: WriteCapture) -> None:
    directory = write_capture()
    for path in (directory / "rank-0").glob("pass-*"):
        path.unlink()
    assert "lists pass-000000.safetensors and does not hold it; bring it back" in refused(directory)
    edit(directory / "rank-0/manifest.json", lambda m: m | {"passes": []})
    assert "is an empty capture: no forward pass was recorded; capture again" in refused(directory)
    edit(directory / "rank-0/manifest.json", lambda m: m | {"errors": ["no hook fired"]})
    assert refused(directory).endswith("(rank 0 says: no hook fired)")
    shutil.rmtree(directory / "rank-0")
    assert "is an empty capture: no rank wrote anything" in refused(directory)


def test_a_pass_cut_anywhere_is_refused(write_capture: WriteCapture) -> None:
    directory = write_capture(hidden=3, points=(POINT,))
    path = directory / "rank-0" / FIRST
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in [*range(0, 12), header - 1, header, header + 1, *range(header + 9, len(whole), 7)]:
        path.write_bytes(whole[:size])
        sentence = refused(directory)
        assert str(path) in sentence and "is damaged: " in sentence and "capture again" in sentence
    path.write_bytes(whole[:-1])
    assert f"it has {len(whole) - 1} bytes and its header describes {len(whole)}" in refused(
        directory
    )
    path.write_bytes(whole + b"\0")
    assert f"it has {len(whole) + 1} bytes" in refused(directory)
    path.write_bytes(whole)
    Capture.open(directory).read(POINT)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 20000,
        b'{"__metadata__":',
        b'{"__metadata__":' + b"[" * 20000,
        b'{"__metadata__":3,"a":{}}',
        b'{"__metadata__":{}}',
        b'{"__metadata__":{"layerbisect":"{}"}}',
        b'{"__metadata__":{"layerbisect":1,"layerbisect.tensors":2}}',
        b'{"__metadata__":{"layerbisect":"{}","layerbisect.tensors":"{}"}}',
        b'{"__metadata__":{"layerbisect":"' + b"[" * 20000 + b'","layerbisect.tensors":"{}"}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    ],
    ids=lambda header: header[:24].decode(errors="replace"),
)
def test_header_garbage_is_refused(write_capture: WriteCapture, header: bytes) -> None:
    directory = write_capture()
    path = directory / "rank-0" / FIRST
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert str(path) in refused(directory)


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {},
        {"dtype": "F8_E4M3", "shape": [6, 8], "data_offsets": [0, 48]},
        {"dtype": ["F32"], "shape": [6, 8], "data_offsets": [0, 192]},
        {"dtype": "BF16", "shape": [6, 8], "data_offsets": [0, 48]},
        {"dtype": "BF16", "shape": [6, 8], "data_offsets": [-96, 0]},
        {"dtype": "BF16", "shape": [-6, -8], "data_offsets": [0, 96]},
        {"dtype": "BF16", "shape": [6.0, 8], "data_offsets": [0, 96]},
        {"dtype": "BF16", "shape": [6, "8"], "data_offsets": [0, 96]},
        {"dtype": "BF16", "shape": 48, "data_offsets": [0, 96]},
        {"dtype": "BF16", "shape": [6, 8], "data_offsets": [0]},
        {"dtype": "BF16", "shape": [6, 8], "data_offsets": [0, 96, 1]},
        {"dtype": "BF16", "shape": [6, 8], "data_offsets": [1 << 60, (1 << 60) + 96]},
        {"dtype": "BF16", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]},
        {"dtype": "BF16", "shape": [48], "data_offsets": [0, 96]},
        {"dtype": "BF16", "shape": [8, 6], "data_offsets": [0, 96]},
    ],
    ids=str,
)
def test_a_tensor_described_wrongly_is_refused(write_capture: WriteCapture, entry: Any) -> None:
    directory = write_capture()
    path = directory / "rank-0" / FIRST
    edit_header(path, lambda header: header.update({POINT: entry}))
    assert str(path) in refused(directory)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda h: h.pop(POINT), f"it lists {POINT} and does not hold it"),
        (lambda h: h.pop("rows.token"), "it lacks rows.token"),
        (lambda h: h.pop("rows.sequence"), "does not fit [row=0, hidden=any]"),
        (lambda h: h.pop("scores.logprob"), "it lacks scores.logprob"),
        (lambda h: h["rows.token"].update(dtype="F64"), "rows.token is F64 of shape [6]"),
        (lambda h: h["rows.token"].update(shape=[2, 3]), "rows.token is I64 of shape [2, 3]"),
        (lambda h: h["scores.logprob"].update(dtype="I64"), "scores.logprob is I64 of shape [6]"),
    ],
)
def test_tables_that_are_not_whole_are_refused(
    write_capture: WriteCapture, change: Callable[[dict[str, Any]], Any], sentence: str
) -> None:
    directory = write_capture()
    edit_header(directory / "rank-0" / FIRST, change)
    assert sentence in refused(directory)


@pytest.mark.parametrize(
    ("key", "change", "sentence"),
    [
        ("layerbisect", lambda r: r.update(schema=2), "has schema 2 and this version reads 1"),
        ("layerbisect", lambda r: r.update(index=5), "it says that it is pass 5"),
        ("layerbisect", lambda r: r.update(phase="banana"), "it.phase must be Literal['forward'"),
        ("layerbisect", lambda r: r.update(phase=["prefill"]), "it.phase must be Literal"),
        ("layerbisect", lambda r: r.update(sequences=[3]), "it.sequences[0] must be SequenceInfo"),
        ("layerbisect", lambda r: r.update(sequences=[{"salt": ""}]), "lacks ['name']"),
        ("layerbisect", lambda r: r["sequences"].pop(), "rows name a sequence that it does not"),
        ("layerbisect", lambda r: r.update(extra=1), "unknown fields ['extra']"),
        ("layerbisect.tensors", lambda r: r.update(tensors=[]), "it.tensors must be"),
        (
            "layerbisect.tensors",
            lambda r: r["tensors"].update({POINT: None}),
            f"it.tensors['{POINT}'] must be TensorHeader, got None",
        ),
        (
            "layerbisect.tensors",
            lambda r: r["tensors"][POINT].update(dims=["hidden", "row"]),
            "dims must be distinct and start with 'row'",
        ),
        (
            "layerbisect.tensors",
            lambda r: r["tensors"][POINT].update(dims=[]),
            "dims must be distinct and start with 'row'",
        ),
        (
            "layerbisect.tensors",
            lambda r: r["tensors"][POINT].update(shards={"hidden": [0, 4]}),
            ".shards['hidden'] must be tuple[int, int, int], got [0, 4]",
        ),
        (
            "layerbisect.tensors",
            lambda r: r["tensors"][POINT].update(shards={"hidden": [0, 4, 8]}),
            "shape [6, 8] does not fit [row=6, hidden=4]",
        ),
        (
            "layerbisect.tensors",
            lambda r: r["tensors"][POINT].update(shards={"hidden": [0, True, 8]}),
            "must be int, got True",
        ),
        (
            "layerbisect.tensors",
            lambda r: r["tensors"][POINT].update(partial_sum=[1, 1]),
            "partial_sum (1, 1) is not [index, count]",
        ),
        (
            "layerbisect.tensors",
            lambda r: r["tensors"][POINT].update(how="guessed"),
            "must be Literal['observed'",
        ),
    ],
)
def test_a_pass_record_that_is_wrong_is_refused(
    write_capture: WriteCapture, key: str, change: Callable[[Any], Any], sentence: str
) -> None:
    directory = write_capture()
    path = directory / "rank-0" / FIRST
    edit_record(path, key, change)
    got = refused(directory)
    assert sentence in got and str(path) in got


@pytest.mark.parametrize("file", ["capture.json", "rank-0/manifest.json"])
@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"x"', "{}", '{"schema": 2}', "\x00", "[" * 20000]
)
def test_json_that_is_no_record_is_refused(
    write_capture: WriteCapture, file: str, text: str
) -> None:
    directory = write_capture()
    (directory / file).write_text(text)
    assert str(directory / file) in refused(directory)


@pytest.mark.parametrize("file", ["capture.json", "rank-0/manifest.json"])
def test_json_that_is_no_text_is_refused(write_capture: WriteCapture, file: str) -> None:
    directory = write_capture()
    (directory / file).write_bytes(b"\xff{}")
    assert "it is not UTF-8" in refused(directory)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"engine": 3}, "it.engine must be str, got 3"),
        ({"num_layers": True}, "it.num_layers must be int, got True"),
        ({"points": [1]}, "it.points[0] must be str, got 1"),
        ({"points": "all"}, "it.points must be tuple[str, ...], got 'all'"),
        ({"moe_layers": ["a"]}, "it.moe_layers[0] must be int"),
        ({"fingerprints": {"a": 1}}, "it.fingerprints['a'] must be str"),
        ({"model_config": []}, "it.model_config must be"),
        ({"weight_version": 3}, "it.weight_version must be str, got 3"),
        ({"colour": 3}, "unknown fields ['colour']"),
    ],
)
def test_a_description_that_is_wrong_is_refused(
    write_capture: WriteCapture, change: dict[str, Any], sentence: str
) -> None:
    directory = write_capture()
    edit(directory / "capture.json", lambda raw: raw | change)
    got = refused(directory)
    assert sentence in got and str(directory / "capture.json") in got


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_a_flipped_bit_is_refused_or_harmless(write_capture: WriteCapture, data: Any) -> None:
    """Any bit of any JSON: either a sentence, or a capture that reads; never another error."""
    directory = write_capture(f"capture-{data.draw(st.uuids())}", steps=1)
    files = [directory / "capture.json", directory / "rank-0/manifest.json"]
    path = data.draw(st.sampled_from([*files, directory / "rank-0" / FIRST]))
    raw = bytearray(path.read_bytes())
    end = len(raw)
    if path.suffix == ".safetensors":
        end = 8 + int.from_bytes(raw[:8], "little")
    raw[data.draw(st.integers(0, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    try:
        capture = Capture.open(directory)
        for point in capture.points:
            capture.read(point)
    except CaptureError as error:
        assert str(directory) in str(error)
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../../secret", "../rank-0/" + FIRST, "", ".", "x"]
)
def test_a_manifest_that_points_elsewhere_is_refused(
    write_capture: WriteCapture, name: str
) -> None:
    directory = write_capture()
    edit(
        directory / "rank-0/manifest.json",
        lambda m: m | {"passes": [{"file": name, "rows": 6}]},
    )
    assert "a capture holds plain files inside its directory alone" in refused(directory)


def test_a_pass_listed_twice_is_refused(write_capture: WriteCapture) -> None:
    directory = write_capture()
    edit(
        directory / "rank-0/manifest.json",
        lambda m: m | {"passes": m["passes"][:1] + m["passes"]},
    )
    assert "each once" in refused(directory)


@pytest.mark.parametrize("finish", [True, False])
@pytest.mark.parametrize(
    "name", ["capture.json", "rank-0", "rank-0/manifest.json", "rank-0/" + FIRST]
)
def test_symbolic_links_are_refused(
    write_capture: WriteCapture, tmp_path: Path, name: str, finish: bool
) -> None:
    directory = write_capture(finish=finish)
    outside = tmp_path / "outside"
    (directory / name).rename(outside)
    (directory / name).symlink_to(outside)
    assert "symbolic link" in refused(directory) or "plain files" in refused(directory)


def test_what_is_no_plain_file_is_not_read(write_capture: WriteCapture) -> None:
    directory = write_capture()
    path = directory / "rank-0" / FIRST
    path.unlink()
    os.mkfifo(path)
    assert f"lists {FIRST} and does not hold it" in refused(directory)


def test_a_row_count_that_lies_is_refused(write_capture: WriteCapture) -> None:
    directory = write_capture()
    edit(
        directory / "rank-0/manifest.json",
        lambda m: m | {"passes": [m["passes"][0] | {"rows": 5}, *m["passes"][1:]]},
    )
    assert f"{FIRST} has 6 rows and its manifest says 5; capture again" in refused(directory)


def test_swapped_passes_are_refused(write_capture: WriteCapture) -> None:
    directory = write_capture(steps=3)
    a, b = (directory / "rank-0" / f"pass-00000{i}.safetensors" for i in (1, 2))
    a.rename(directory / "x")
    b.rename(a)
    (directory / "x").rename(b)
    assert "it says that it is pass 2" in refused(directory)


def test_a_missing_rank_is_said_and_what_is_whole_still_reads(
    write_capture: WriteCapture,
) -> None:
    directory = write_capture(ranks=3)
    shutil.rmtree(directory / "rank-1")
    capture = Capture.open(directory)
    assert not capture.finished
    assert capture.problems == ("ranks [1] of 3 wrote nothing",)
    assert len(capture.read(POINT)) == len(capture.rows)


def test_a_missing_rank_of_a_sharded_point_is_refused(write_capture: WriteCapture) -> None:
    directory = write_capture(ranks=2, points=(POINT,), steps=0)
    for rank in (0, 1):
        shards = {"hidden": [8 * rank, 8 * rank + 8, 16]}

        def cut(record: Any, shards: dict[str, list[int]] = shards) -> None:
            record["tensors"][POINT].update(shards=shards)

        edit_record(directory / f"rank-{rank}" / FIRST, "layerbisect.tensors", cut)
    assert Capture.open(directory).read(POINT).shape == (6, 16)
    shutil.rmtree(directory / "rank-1")
    sentence = refused(directory)
    assert f"{POINT}: shards do not tile it: 50% of the values are on no rank" in sentence
    assert sentence.endswith("(known of this capture: ranks [1] of 2 wrote nothing)")


def test_ranks_of_different_captures_are_refused(write_capture: WriteCapture) -> None:
    directory, other = write_capture(ranks=2), write_capture("other", ranks=3)
    shutil.copytree(other / "rank-2", directory / "rank-2")
    assert "holds parts of different captures: of [2, 3] ranks" in refused(directory)
    shutil.rmtree(directory / "rank-2")
    (directory / "rank-1").rename(directory / "rank-2")
    assert "it is of rank 1" in refused(directory)
    edit(directory / "rank-2/manifest.json", lambda m: m | {"rank": 2})
    assert "there is no rank 2 among 2" in refused(directory)


def test_ranks_whose_passes_do_not_belong_together_are_refused(
    write_capture: WriteCapture,
) -> None:
    directory = write_capture(ranks=2)
    edit_record(directory / "rank-1" / FIRST, "layerbisect", lambda r: r.update(phase="decode"))
    assert "is a decode and a prefill pass on different ranks" in refused(directory)


def test_foreign_files_beside_a_capture_are_ignored(write_capture: WriteCapture) -> None:
    directory = write_capture(finish=False)
    (directory / "notes.txt").touch()
    (directory / "rank-0" / ".pass-000009.safetensors.tmp").write_bytes(b"half")
    (directory / "rank-0" / "pass-7.safetensors").write_bytes(b"half")
    (directory / "rank-9").mkdir()
    assert len(Capture.open(directory).rows) == 10


def test_a_capture_deleted_while_open_is_said(write_capture: WriteCapture) -> None:
    directory = write_capture()
    capture = Capture.open(directory)
    path = directory / "rank-0" / FIRST
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CaptureError, match="was the capture deleted or overwritten"):
        capture.read(POINT)
    shutil.rmtree(directory)
    with pytest.raises(CaptureError, match="was the capture deleted or overwritten"):
        capture.read(POINT)
