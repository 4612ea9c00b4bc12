"""However tokens are fed, each row knows its place in its sequence."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.captures.lanes import Lane, Names, feed
from layerbisect.captures.rows import Rows
from layerbisect.captures.scores import ScoreKeeper, logprobs_of, score_pass

lanes_of_sequences = st.lists(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=3),
    min_size=1,
    max_size=3,
)


@given(lanes_of_sequences, st.data())
def test_packed_padded_and_chunked_rows(packed: list[list[list[int]]], data: st.DataObject) -> None:
    # lay each lane's sequences end to end, with padding anywhere, and feed them in chunks
    token, valid, restart = [], [], []
    for sequences in packed:
        columns: list[tuple[int, bool, bool]] = []
        for sequence in sequences:
            for place, item in enumerate(sequence):
                columns += [(9, False, False)] * data.draw(st.integers(0, 1))
                columns.append((item, True, place == 0))
        token.append([c[0] for c in columns])
        valid.append([c[1] for c in columns])
        restart.append([c[2] for c in columns])
    width = max(map(len, token))
    grids = [
        np.array([row + [fill] * (width - len(row)) for row in grid])
        for grid, fill in ((token, 9), (valid, False), (restart, False))
    ]
    cuts = sorted(data.draw(st.sets(st.integers(1, width - 1)))) if width > 1 else []
    lanes, names = tuple(Lane.blank() for _ in packed), Names()
    found: dict[str, list[int]] = {}
    for start, stop in zip([0, *cuts], [*cuts, width], strict=True):
        part = [grid[:, start:stop] for grid in grids]
        fed = feed(lanes, part[0], part[1], part[2], names)
        lanes = fed.lanes
        assert np.array_equal(part[0].reshape(-1)[fed.index], fed.rows.token)
        assert not len(fed.context)
        for number, position, item in zip(
            fed.rows.sequence, fed.rows.position, fed.rows.token, strict=True
        ):
            known = found.setdefault(fed.sequences[number].name, [])
            assert position == len(known)
            known.append(int(item))
    expected = sorted(s for sequences in packed for s in sequences)
    assert sorted(found.values()) == expected and not names.renamed
    for lane, row in zip(lanes, grids[1], strict=True):
        assert np.array_equal(lane.valid, row)


def test_a_cropped_lane_forgets_the_sequences_behind() -> None:
    names, one = Names(), np.ones((1, 6), bool)
    restart = np.array([[True, False, False, True, False, False]])
    fed = feed([Lane.blank()], np.arange(6)[None], one, restart, names)
    (lane,) = fed.lanes
    assert lane.prefix.tolist() == [3, 4, 5]
    assert lane.cropped(4).prefix.tolist() == [3]
    assert lane.cropped(3).prefix.tolist() == [0, 1, 2]
    again = feed([lane.cropped(2)], np.array([[7]]), one[:, :1], ~one[:, :1], names)
    # another third token under the name of the first sequence: it gets one of its own
    assert [s.name for s in again.sequences] == ["s0~1"]
    assert again.rows.position.tolist() == [2] and again.context.token.tolist() == [0, 1]


@pytest.mark.parametrize("chunk", [1, 2, 3, 10])
def test_scores_over_passes_are_those_of_one(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 7, generator=generator)
    tokens = torch.randint(7, (10,), generator=generator).numpy()
    expected = logprobs_of(logits, tokens[1:], np.arange(9))
    keeper, found = ScoreKeeper(), []
    for start in range(0, 10, chunk):
        part = slice(start, start + chunk)
        position = np.arange(10)[part]
        rows = Rows.of(np.zeros_like(position), position, tokens[part])
        found.append(keeper.score(["a"], rows, logits[part]).logprob)
    assert np.allclose(np.concatenate(found), expected)


def test_logits_of_some_rows_score_the_tokens_after_them() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    rows = Rows.of([0, 0, 1, 1], [3, 4, 0, 1], [1, 2, 3, 4])
    scores, pending = score_pass(rows, logits[[0, 3]], {0: (2, logits[1])}, kept=np.array([0, 3]))
    assert scores.rows.token.tolist() == [1, 2]
    expected = torch.log_softmax(logits[[1, 0]], -1)[[0, 1], [1, 2]]
    assert np.allclose(scores.logprob, expected.numpy())
    assert list(pending) == [1] and pending[1][0] == 1


def test_the_tail_of_a_large_vocabulary_counts() -> None:
    logits = torch.full((2, 150_000), -16.5)
    logits[:, 5] = 0.0
    scores = logprobs_of(logits, np.array([5, 6]))
    exact = torch.log_softmax(logits.double(), -1)[[0, 1], [5, 6]]
    assert np.allclose(scores, exact.numpy(), rtol=0, atol=4e-6)
