"""Masks tell tokens from padding, and a mask under which rows are no prefixes is a problem."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.captures.megatron import padding
from tests.captures.megatron.calling import read, table

lanes_of_lengths = st.lists(st.integers(0, 6), min_size=1, max_size=3)


def masks(token: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Say in each of Megatron's ways which columns of [b, s] are tokens."""
    width = token.shape[1]
    sees = torch.ones(width, width, dtype=torch.bool).tril() & token[:, None, :] & token[:, :, None]
    return {
        "padding_mask": {"padding_mask": ~token},
        "attention_mask": {"mask": token.long()},
        "4-D": {"mask": ~sees[:, None]},
    }


@given(lanes_of_lengths, st.sampled_from(["padding_mask", "attention_mask", "4-D"]), st.booleans())
def test_padding_is_no_row(lengths: list[int], way: str, left: bool) -> None:
    width = 6
    shift = [width - n if left else 0 for n in lengths]
    columns = torch.arange(width)
    token = torch.stack(
        [(columns >= s) & (columns < s + n) for s, n in zip(shift, lengths, strict=True)]
    )
    ids = torch.arange(token.numel()).reshape(token.shape)
    call = read(ids, **masks(token)[way])
    expected = [
        (i, p, i * width + shift[i] + p) for i in range(len(lengths)) for p in range(lengths[i])
    ]
    assert sorted(table(call)) == expected
    assert np.array_equal(ids.T.reshape(-1).numpy()[call.index], call.rows.token)
    assert call.last.tolist() == [p + 1 == lengths[s] for s, p, _ in table(call)]
    # RoPE counts columns
    moved = [i for i, n in enumerate(lengths) if 0 < n < width and left]
    assert len(call.problems) == len(moved)
    for lane, problem in zip(moved, call.problems, strict=True):
        assert f"sequence {lane} has padding on the left" in problem


def test_one_mask_for_all_sequences() -> None:
    hidden = torch.ones(1, 1, 3, 3, dtype=torch.bool).triu(1)
    call = read(torch.zeros(2, 3), mask=hidden)
    assert len(call.rows) == 6 and not call.problems


def test_padding_between_tokens_is_a_problem() -> None:
    token = torch.tensor([[1, 0, 1, 1]])
    call = read(torch.arange(4)[None], mask=token)
    # position 1 was never seen, so that the rows after it have no key and are not compared
    assert table(call) == [(0, 0, 0), (0, 2, 2), (0, 3, 3)]
    assert "sequence 0 has padding between its tokens" in call.problems[0]


@pytest.mark.parametrize(
    ("query", "column", "hide"), [(1, 2, False), (4, 1, True)], ids=["ahead", "behind"]
)
def test_a_mask_that_is_not_causal(
    query: int, column: int, hide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.ones(2, 1, 5, 5, dtype=torch.bool).triu(1)
    hidden[1, 0, query, column] = hide
    # wherever the mask is parted
    for size in (1, 2, 8):
        monkeypatch.setattr(padding, "_QUERIES", size)
        (problem,) = read(torch.zeros(2, 5), mask=hidden).problems
        assert f"not causal at column {query} of sequence 1" in problem


def test_padding_that_tokens_attend_to() -> None:
    token = torch.tensor([[False, True, True]])
    causal = torch.ones(1, 1, 3, 3, dtype=torch.bool).triu(1)
    call = read(torch.zeros(1, 3), mask=causal, padding_mask=~token)
    assert any("not causal at column 1 of sequence 0" in p for p in call.problems)


def test_several_documents_in_a_row() -> None:
    # as --reset-attention-mask cuts them
    hidden = ~torch.block_diag(*[torch.ones(2, 2).tril()] * 2).bool()[None, None]
    (problem,) = read(torch.zeros(1, 4), mask=hidden).problems
    assert "not causal at column 2 of sequence 0" in problem and "packed_seq_params" in problem


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.ones(1, 6), r"attention_mask of shape \[1, 6\] is not cut as input_ids of \[2, 3\]"),
        (torch.zeros(2, 3, 3), r"attention_mask of shape \[2, 3, 3\] is not cut"),
        (
            torch.zeros(2, 1, 3, 4, dtype=torch.bool),
            r"\[2, 1, 3, 4\] and not torch.bool of \[2, 1, 3, 3\]",
        ),
        (torch.zeros(2, 1, 3, 3), "attention_mask is torch.float32"),
    ],
)
def test_a_mask_that_cannot_be_read(mask: torch.Tensor, said: str) -> None:
    call = read(torch.zeros(2, 3), mask=mask)
    assert len(call.rows) == 6
    (problem,) = call.problems
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(problem)


@given(st.integers(1, 3), st.integers(2, 3), st.integers(1, 3), st.data())
def test_a_mask_cut_to_a_context_parallel_rank(
    lanes: int, size: int, chunk: int, data: st.DataObject
) -> None:
    width = 2 * size * chunk
    lengths = torch.tensor([data.draw(st.integers(0, width)) for _ in range(lanes)])
    token = torch.arange(width) < lengths[:, None]
    whole = masks(token)["4-D"]["mask"]
    ids = torch.arange(lanes * width).reshape(lanes, width)
    found = []
    for rank in range(size):
        chunks = torch.arange(width).reshape(2 * size, -1)
        mine = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
        call = read(ids[:, mine], context=(rank, size), mask=whole[:, :, mine])
        found += table(call)
        # padding on another rank is not known here, but lies behind every token
        assert not call.problems
    assert sorted(found) == [(i, p, i * width + p) for i in range(lanes) for p in range(lengths[i])]


def test_left_padding_under_context_parallelism() -> None:
    token = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])
    call = read(torch.arange(4)[None], context=(0, 2), mask=token[:, [0, 1, 6, 7]])
    # columns count, on this rank as on the one that cannot know of the padding
    assert [p for _, p, _ in table(call)] == [1, 6, 7]
    assert "sequence 0 has padding on the left" in call.problems[0]
