"""Log-probs that ranks write in parts of the vocabulary and of the sequence, put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import CaptureInfo, SequenceInfo
from layerbisect.captures.rows import Rows
from layerbisect.captures.scores import logprobs_of
from layerbisect.captures.store import Capture
from layerbisect.captures.vocab_scores import ShardScores, combine, shard_scores
from layerbisect.captures.writer import CaptureWriter


def layout(lengths: list[int], seed: int, vocab: int) -> tuple[Rows, torch.Tensor]:
    """Whole sequences end to end, with the logits at each row."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    rows = Rows.of(
        np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate([np.arange(n) for n in lengths]),
        torch.randint(vocab, (count,), generator=generator).numpy(),
    )
    return rows, torch.randn(count, vocab, generator=generator) * 5


def part(
    rows: Rows, logits: torch.Tensor, vocab: tuple[int, int, int], mine: Any, padding: int
) -> ShardScores:
    """What a rank writes that holds the rows ``mine`` and a part of the vocabulary."""
    index = np.flatnonzero(mine)
    held = rows.take(index)
    after = np.full(len(index), -1, np.int64)
    for place, row in enumerate(index):
        following = row + 1
        same = following < len(rows) and rows.sequence[following] == rows.sequence[row]
        if same and mine[following]:
            after[place] = int(np.searchsorted(index, following))
    shard = torch.cat(
        [logits[index, vocab[0] : vocab[1]], torch.full((len(index), padding), -50.0)], dim=1
    )
    return shard_scores(shard, vocab, held, after, np.ones(len(index), bool))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 22), unique=True, max_size=3),
    owner=st.lists(st.integers(0, 2), min_size=36, max_size=36),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
def test_parts_of_the_vocabulary_and_of_the_sequence_give_the_log_probs_of_the_whole(
    lengths: list[int], cuts: list[int], owner: list[int], padding: int, seed: int
) -> None:
    vocab = 23
    rows, logits = layout(lengths, seed, vocab)
    edges = [0, *sorted(cuts), vocab]
    parts = [
        part(rows, logits, (a, b, vocab), np.array(owner[: len(rows)]) == rank, padding)
        for a, b in zip(edges, edges[1:], strict=False)
        for rank in range(3)
    ]
    scored, logprob, problem, _ = combine([p.resolved(rows) for p in parts])
    assert problem is None
    wanted = np.flatnonzero(rows.position > 0)
    assert list(zip(scored.sequence, scored.position, scored.token, strict=True)) == list(
        zip(rows.sequence[wanted], rows.position[wanted], rows.token[wanted], strict=True)
    )
    expected = logprobs_of(logits, rows.token[wanted], wanted - 1)
    np.testing.assert_allclose(logprob, expected, atol=2e-5)


def test_padding_of_the_vocabulary_that_has_probability_is_left_out_and_told() -> None:
    rows, logits = layout([6], 0, 10)
    everything = np.ones(6, bool)
    padded = torch.cat([logits, torch.full((6, 3), float(logits.max()))], dim=1)
    after = np.array([1, 2, 3, 4, 5, -1])
    parts = [
        shard_scores(padded[:, :10], (0, 10, 10), rows, after, ~everything),
        # nothing but padding
        shard_scores(padded[:, 10:], (10, 10, 10), rows, after, ~everything),
    ]
    _, logprob, problem, leak = combine(parts)
    np.testing.assert_allclose(
        logprob, logprobs_of(logits, rows.token[1:], np.arange(5)), atol=2e-5
    )
    lost = (padded.logsumexp(1) - logits.logsumexp(1))[:5].mean()
    assert problem is None and leak == pytest.approx(float(lost), abs=1e-5)


def test_the_padding_of_all_passes_is_told_once(tmp_path: Path, info: CaptureInfo) -> None:
    writer = CaptureWriter(tmp_path / "c", info)
    leaks = []
    for seed, length in ((1, 5), (2, 9)):
        rows, logits = layout([length], seed, 10)
        after = np.append(np.arange(1, length), -1)
        padded = torch.cat([logits, logits[:, :2]], dim=1)
        leaks += list((padded.logsumexp(1) - logits.logsumexp(1))[: length - 1].tolist())
        scores = shard_scores(padded, (0, 10, 10), rows, after, np.zeros(length, bool))
        writer.write_pass("forward", [SequenceInfo(f"s{seed}")], rows, {}, {}, scores=scores)
    writer.finish()
    (problem,) = Capture.open(tmp_path / "c").problems
    assert f"scores tokens {np.mean(leaks):.2g} nat lower than this capture" in problem


def test_a_part_in_which_all_is_masked_out_has_no_probability_and_makes_no_nan() -> None:
    rows, logits = layout([5], 0, 10)
    logits[1, 4:] = -torch.inf
    everything = np.ones(5, bool)
    parts = [part(rows, logits, vocab, everything, 0) for vocab in ((0, 4, 10), (4, 10, 10))]
    _, logprob, problem, _ = combine([p.resolved(rows) for p in parts])
    expected = torch.log_softmax(logits, 1)[:4].gather(1, torch.from_numpy(rows.token[1:, None]))
    np.testing.assert_allclose(logprob, expected[:, 0], atol=2e-5)
    assert problem is None


def test_ranks_that_score_the_same_logits_differently_are_told() -> None:
    rows, logits = layout([5], 0, 10)
    everything = np.ones(5, bool)
    other = logits.clone()
    other[2, 3] += 1
    parts = [part(rows, one, (0, 10, 10), everything, 0) for one in (logits, other)]
    scored, _, problem, _ = combine(parts)
    assert len(scored) == 4
    assert problem == "ranks that hold the same logits scored 1 tokens differently"


def test_a_missing_part_of_the_vocabulary_scores_nothing_and_is_named() -> None:
    rows, logits = layout([4], 0, 10)
    everything = np.ones(4, bool)
    parts = [part(rows, logits, vocab, everything, 0) for vocab in ((0, 4, 10), (4, 8, 10))]
    scored, logprob, problem, _ = combine(parts)
    assert not len(scored) and not len(logprob)
    assert problem is not None and "[0, 4), [4, 8) of a vocabulary of 10" in problem


@pytest.fixture
def info() -> CaptureInfo:
    return CaptureInfo(
        engine="test",
        engine_version="0",
        label="trainer",
        device="cpu",
        dtype="float32",
        num_layers=1,
        moe_layers=(),
        points=("logprob",),
    )


def test_a_capture_reads_the_log_probs_that_its_ranks_wrote_in_parts(
    tmp_path: Path, info: CaptureInfo
) -> None:
    rows, logits = layout([5, 3], 1, 12)
    # the first sequence is cut between the ranks of each half of the vocabulary
    mine = [rows.position < 2, rows.position >= 2]
    for rank in range(4):
        vocab = ((0, 7, 12), (7, 12, 12))[rank % 2]
        held = mine[rank // 2]
        writer = CaptureWriter(tmp_path / "c", info, rank=rank, world_size=4, name=f"tp {rank % 2}")
        writer.write_pass(
            "forward",
            [SequenceInfo("a"), SequenceInfo("b")],
            rows.take(held),
            {},
            {},
            scores=part(rows, logits, vocab, held, 0),
        )
        writer.finish()
    capture = Capture.open(tmp_path / "c")
    assert capture.finished and not capture.problems
    wanted = np.flatnonzero(rows.position > 0)
    np.testing.assert_allclose(
        capture.scores.logprob, logprobs_of(logits, rows.token[wanted], wanted - 1), atol=2e-5
    )
    assert capture.scores.keys.known.all()


def test_passes_are_paired_within_a_replica_alone(tmp_path: Path, info: CaptureInfo) -> None:
    """Replicas are given tokens of their own, and may be given unequally many."""
    for rank in range(4):
        replica = rank // 2
        writer = CaptureWriter(
            tmp_path / "c", info, rank=rank, world_size=4, replica=replica, name=f"dp {replica}"
        )
        for number in range(1 + replica):
            rows = Rows.of(np.zeros(2, int), [0, 1], [number, replica])
            writer.write_pass("forward", [SequenceInfo(f"dp{replica}.s{number}")], rows, {}, {})
        writer.finish()
    capture = Capture.open(tmp_path / "c")
    assert capture.finished and not capture.problems
    assert [s.name for s in capture.sequences] == ["dp0.s0", "dp1.s0", "dp1.s1"]


def test_replicas_that_hold_different_weights_are_a_finding(
    tmp_path: Path, info: CaptureInfo
) -> None:
    for rank, digest in enumerate(("aa", "aa", "bb")):
        writer = CaptureWriter(
            tmp_path / "c",
            info,
            rank=rank,
            world_size=3,
            replica=rank,
            name=f"dp {rank}",
            fingerprints={"model.norm.weight": digest},
        )
        rows = Rows.of([0], [0], [rank])
        writer.write_pass("forward", [SequenceInfo(f"s{rank}")], rows, {}, {})
        writer.finish()
    capture = Capture.open(tmp_path / "c")
    assert capture.problems == (
        "rank 0 (dp 0) and rank 2 (dp 2) hold different values of model.norm.weight",
    )
    (finding,) = capture.weight_findings
    assert finding.ranks == ("rank 0 (dp 0)", "rank 2 (dp 2)")
    assert finding.digests == {"model.norm.weight": ("aa", "bb")}
    assert capture.weights_moved == str(finding)
    assert capture.info.fingerprints == {"model.norm.weight": "aa"}


def test_ranks_that_did_not_write_together_are_refused(tmp_path: Path, info: CaptureInfo) -> None:
    for rank, run in enumerate(("first", "second")):
        writer = CaptureWriter(tmp_path / "c", info, rank=rank, world_size=2, run=run)
        rows = Rows.of([0], [0], [1])
        writer.write_pass("forward", [SequenceInfo("s0")], rows, {}, {})
        writer.finish()
    with pytest.raises(CaptureError, match="rank 0 and rank 1 did not write together"):
        Capture.open(tmp_path / "c")
