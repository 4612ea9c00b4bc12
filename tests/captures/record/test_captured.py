"""C looked up in a capture: whatever the order, whoever scored what, and how often."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.captures.errors import RecordError, TrainerError
from layerbisect.captures.format import CaptureInfo, SequenceInfo
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.captured import score_from_capture
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.rows import Rows
from layerbisect.captures.store import Capture
from layerbisect.captures.telling import CaptureWarning
from layerbisect.captures.weight_states import WEIGHTS_CHANGED
from layerbisect.captures.writer import CaptureWriter, Scores
from layerbisect.cli import main

INFO = CaptureInfo(
    engine="megatron-core",
    engine_version="0.16.1",
    label="trainer",
    device="cpu",
    dtype="bfloat16",
    num_layers=2,
    moe_layers=(),
    points=("logprob",),
    parallel={"tp": 1, "pp": 2, "dp": 2},
)

Tokens = tuple[int, ...]
Pass = Sequence[Tokens]


def logprob(prefix: Tokens, number: int) -> float:
    """The score of a prefix's last token in the capture's sequence of that number."""
    return -float(np.random.default_rng([len(prefix), *prefix]).random()) - number


def write(
    directory: Path,
    replicas: Sequence[Sequence[Pass]],
    *,
    info: CaptureInfo = INFO,
    seed: int = 0,
    salt: str = "",
    world: int = 0,
    finish: bool = True,
    errors: Sequence[str] = (),
    fingerprints: Sequence[dict[str, str]] = (),
) -> Path:
    """Write a capture: for each replica its passes, of whole sequences whose rows are shuffled."""
    random, number = np.random.default_rng(seed), 0
    for replica, passes in enumerate(replicas):
        writer = CaptureWriter(
            directory,
            info,
            rank=replica,
            world_size=world or len(replicas),
            replica=replica,
            fingerprints=fingerprints[replica] if fingerprints else {"a": "1"},
        )
        for error in errors:
            writer.error(error)
        for tokens in passes:
            names, rows, scores = [], [], []
            for place, sequence in enumerate(tokens):
                names.append(SequenceInfo(f"dp{replica}.s{number}", salt))
                for position, token in enumerate(sequence):
                    rows.append((place, position, token))
                    scores.append(logprob(sequence[: position + 1], number))
                number += 1
            order = random.permutation(len(rows))
            table = Rows.of(*np.array(rows)[order].T)
            later = np.flatnonzero(table.position > 0)
            known = Scores(table.take(later), np.array(scores)[order][later])
            writer.write_pass("forward", names, table, {}, {}, scores=known)
        if finish:
            writer.finish()
    return directory


def record(calls: Sequence[tuple[Tokens, Tokens]], **fields: Any) -> ScoreRecord:
    return ScoreRecord(
        RecordInfo(columns={"A": Scoring()}),
        [
            Call.of(f"call-{n}", asked, answer, {"A": np.full(len(answer), -1.0)}, **fields)
            for n, (asked, answer) in enumerate(calls)
        ],
    )


CALLS = (((5, 6), (1, 2, 3)), ((5, 6), (1, 2, 4)), ((7,), (8, 9)))
WHOLE = tuple(asked + answer for asked, answer in CALLS)


token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@given(
    calls=st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=6),
    others=st.lists(token_lists, max_size=4),
    repeats=st.integers(1, 3),
    replicas=st.integers(1, 3),
    draw=st.randoms(use_true_random=False),
)
def test_each_column_of_a_call_is_one_forward_of_it_whatever_the_order(
    calls: list[tuple[Tokens, Tokens]],
    others: list[Tokens],
    repeats: int,
    replicas: int,
    draw: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # few tokens, so prompts are shared, calls repeated, and some calls begin others
    given = [asked + answer for asked, answer in calls] * repeats + others
    draw.shuffle(given)
    dealt: list[list[list[Tokens]]] = [[] for _ in range(replicas)]
    while given:
        size = draw.randint(1, 3)
        dealt[draw.randrange(replicas)].append(given[:size])
        given = given[size:]
    for passes in dealt:
        passes.append([(9,)])
    directory = tmp_path_factory.mktemp("drawn") / "capture"
    write(directory, dealt, seed=draw.randrange(2**16))
    order = [tokens for passes in dealt for tokens in sum(passes, [])]
    scored = score_from_capture(record(calls), directory)

    holders = [
        [n for n, tokens in enumerate(order) if tokens[: len(asked + answer)] == asked + answer]
        for asked, answer in calls
    ]
    # the last token is seen by a sequence with the whole call alone, those before by more
    columns = min(map(len, holders))
    assert columns >= repeats
    assert scored.columns == ("A", *(f"C{n}" for n in range(columns)))
    for call, (asked, answer), numbers in zip(scored, calls, holders, strict=True):
        for column in range(columns):
            expected = [
                logprob(asked + answer[: n + 1], numbers[column]) for n in range(len(answer))
            ]
            np.testing.assert_array_equal(call.scores[f"C{column}"], expected)


def test_columns_say_what_scored_them(tmp_path: Path) -> None:
    path = record(CALLS).save(tmp_path / "r.safetensors")
    capture = write(tmp_path / "capture", [[WHOLE], [WHOLE]])
    score_from_capture(ScoreRecord.open(path), capture, path, weight_version="T3")
    found = ScoreRecord.open(path)
    assert found.columns == ("A", "C0", "C1")
    how = found.info.columns["C1"]
    assert (how.engine, how.weight_version) == ("megatron-core 0.16.1", "T3")
    assert (how.settings["dtype"], how.settings["pp"]) == ("bfloat16", "2")
    assert how.digest == found.info.columns["C0"].digest is not None


def test_digests_follow_all_weights_or_are_left_out(tmp_path: Path) -> None:
    def digest(name: str, fingerprints: dict[str, str], **parallel: int) -> str | None:
        info = dataclasses.replace(INFO, parallel=parallel)
        capture = write(tmp_path / name, [[WHOLE]], info=info, fingerprints=[fingerprints])
        return score_from_capture(record(CALLS), capture).info.columns["C0"].digest

    one = digest("one", {"a": "1", "b": "2"})
    assert one == digest("same", {"b": "2", "a": "1"}, pp=2, ep=2) is not None
    assert one != digest("updated", {"a": "1", "b": "3"})
    assert digest("cut", {"a": "1", "b": "2"}, tp=2) is None
    assert digest("experts cut", {"a": "1", "b": "2"}, etp=2) is None
    assert digest("none", {}) is None


def test_what_there_is_is_kept_and_what_lacks_is_added(tmp_path: Path) -> None:
    capture = write(tmp_path / "capture", [[WHOLE], [WHOLE]])
    once = score_from_capture(record(CALLS), capture).without("C1")
    twice = score_from_capture(once, capture)
    assert twice.columns == ("A", "C0", "C1")
    for call, tokens, number in zip(twice, WHOLE, (3, 4, 5), strict=True):
        assert call.scores["C1"][-1] == logprob(tokens, number)
    with pytest.raises(RecordError, match=r"has C0, C1 already.*never overwritten"):
        score_from_capture(twice, capture)
    other = once.without("C0").with_column(
        "C0", {c.name: c.scores["C0"] for c in once}, Scoring(engine="transformers 5.0")
    )
    with pytest.raises(RecordError, match=r"C0 was scored by transformers 5.0"):
        score_from_capture(other, capture)
    updated = write(tmp_path / "updated", [[WHOLE], [WHOLE]], fingerprints=[{"a": "2"}] * 2)
    with pytest.raises(RecordError, match="C0 was scored by other weights"):
        score_from_capture(once, updated)


def test_missing_tokens_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    capture = write(tmp_path / "capture", [[[WHOLE[0], WHOLE[1][:-1]]]])
    with pytest.raises(TrainerError) as refused:
        score_from_capture(record(CALLS), capture)
    told = str(refused.value)
    assert "no score of 3 of 8 response tokens, in 2 of 3 calls, the first in 'call-1'" in told
    assert "at response position 2; capture a forward over all of the record's calls" in told


def test_what_the_masks_leave_out_need_not_be_scored(tmp_path: Path) -> None:
    capture = write(tmp_path / "capture", [[[WHOLE[0][:-1]]]])
    masked = record(CALLS[:1], mask=[1, 1, 0])
    (call,) = score_from_capture(masked, capture)
    assert np.isnan(call.scores["C0"]).tolist() == [False, False, True]
    with pytest.raises(TrainerError, match="masks leave all response tokens out"):
        score_from_capture(record(CALLS[:1], mask=[0, 0, 0]), capture)


def test_the_context_is_the_captures_salt(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", [[WHOLE]])
    adapted = write(tmp_path / "adapted", [[WHOLE]], salt="adapter:sql")
    asked = record(CALLS, context={"adapter": "sql"})
    assert score_from_capture(asked, adapted).columns == ("A", "C0")
    with pytest.raises(TrainerError, match="salt 'adapter:sql'"):
        score_from_capture(asked, plain)
    with pytest.raises(TrainerError, match="no score of 8 of 8"):
        score_from_capture(record(CALLS), adapted)


def test_documents_are_sequences_of_their_own(tmp_path: Path) -> None:
    capture = write(tmp_path / "capture", [[[(5, 6), (7, 8, 9)]]])
    packed = record([((5, 6, 7), (8, 9))], starts=[0, 2], positions=[0, 1, 0, 1, 2])
    (call,) = score_from_capture(packed, capture)
    assert call.scores["C0"].tolist() == [logprob((7, 8), 1), logprob((7, 8, 9), 1)]
    with pytest.raises(TrainerError, match="positions that do not count"):
        score_from_capture(record(CALLS[2:], positions=[0, 2, 3]), capture)


@pytest.mark.parametrize(
    "lack", [{"world": 3}, {"finish": False}, {"errors": ["sequence 0 has padding on the left"]}]
)
def test_a_capture_that_is_not_whole_serves_where_its_scores_are(
    tmp_path: Path, lack: dict[str, Any]
) -> None:
    capture = Capture.open(write(tmp_path / "capture", [[WHOLE], [WHOLE]], **lack))
    assert capture.problems
    with pytest.warns(CaptureWarning, match="has all scores, but is not whole"):
        scored = score_from_capture(record(CALLS), capture)
    assert scored.columns == ("A", "C0", "C1")
    more = record([*CALLS, ((1, 1), (1,))])
    with pytest.raises(TrainerError) as refused:
        score_from_capture(more, capture)
    assert f"; the capture says: {capture.problems[0]}" in str(refused.value)


def test_scores_of_two_states_of_the_weights_are_refused(tmp_path: Path) -> None:
    changed = f"{WEIGHTS_CHANGED} (3 tensors, a first); capture one state"
    of_ranks = [{"a": "1"}, {"a": "2"}]
    captures = (
        write(tmp_path / "moved", [[WHOLE]], errors=[changed]),
        write(tmp_path / "apart", [[WHOLE], [WHOLE]], fingerprints=of_ranks),
    )
    for capture in captures:
        with pytest.raises(TrainerError, match="more than one state of the weights"):
            score_from_capture(record(CALLS), capture)


def test_what_is_no_trainers_own_forward_is_refused(tmp_path: Path) -> None:
    for info, message in (
        (dataclasses.replace(INFO, engine="sglang"), "the rollout engine"),
        (dataclasses.replace(INFO, routes="forced"), "routes that were forced"),
    ):
        capture = write(tmp_path / message, [[WHOLE]], info=info)
        with pytest.raises(TrainerError, match=message):
            score_from_capture(record(CALLS), capture)


def test_a_score_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "logprob", lambda prefix, number: -np.inf)
    capture = write(tmp_path / "capture", [[WHOLE]])
    with pytest.raises(TrainerError, match=r"score -inf at response position 0 \(token 1\)"):
        score_from_capture(record(CALLS), capture)


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["scores", "trainer", *map(str, arguments)])


def test_from_the_command_line(tmp_path: Path) -> None:
    path = record(CALLS).save(tmp_path / "r.safetensors")
    capture = write(tmp_path / "capture", [[WHOLE], [WHOLE]], world=3)
    done = invoke(path, "--capture", capture, "--weight-version", "T1", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["columns"] == ["A", "C0", "C1"]
    assert done.stderr.startswith("warning: the capture ")
    assert ScoreRecord.open(path).info.columns["C0"].weight_version == "T1"


def test_bad_usage_is_one_sentence(tmp_path: Path) -> None:
    path = record(CALLS).save(tmp_path / "r.safetensors")
    capture = write(tmp_path / "capture", [[WHOLE]])
    for arguments, message in (
        ((), "give either --model"),
        (("--model", tmp_path, "--capture", capture), "give either --model"),
        (("--capture", tmp_path), "holds no capture"),
        (("--capture", capture, "--repeats", 3), "--repeats is of the forward that --model runs"),
    ):
        done = invoke(path, *arguments)
        assert done.exit_code == 2, arguments
        errors = [line for line in done.stderr.splitlines() if line.lower().startswith("error: ")]
        assert len(errors) == 1 and message in errors[0], done.stderr
    assert ScoreRecord.open(path).columns == ("A",)
