"""Sets of experts, margins and causes, over any routes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerbisect.bisect.routing_flips import (
    by_expert,
    causes_of,
    logits_differ,
    margins,
    overlap,
    rerouted_so_far,
    shared_weights_differ,
)
from layerbisect.bisect.routing_report import CAUSES
from layerbisect.bisect.selection import expert_sets, largest
from layerbisect.kernels.judging.choices import TIE_MARGIN


@st.composite
def two_logits(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Two sides' logits [row, expert], all different in a row, and how many are chosen."""
    rows, experts = draw(st.integers(1, 6)), draw(st.integers(2, 9))
    seed = draw(st.integers(0, 2**20))
    noise = draw(st.sampled_from([0.0, 0.05, 2.0]))
    draws = torch.Generator().manual_seed(seed)
    first = torch.randn(rows, experts, generator=draws, dtype=torch.float64)
    second = first + noise * torch.randn(rows, experts, generator=draws, dtype=torch.float64)
    return first, second, draw(st.integers(1, experts))


@given(two_logits())
def test_overlap_is_what_sets_have_in_common(case: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    first, second, count = case
    a, b = largest(first, count), largest(second, count)
    expected = [
        len(set(x.nonzero().flatten().tolist()) & set(y.nonzero().flatten().tolist())) / count
        for x, y in zip(a, b, strict=True)
    ]
    assert overlap(a, b).tolist() == pytest.approx(expected)
    assert torch.equal(overlap(a, b), overlap(b, a))
    assert bool(((overlap(a, b) == 1) == (a == b).all(1)).all())


@given(two_logits(), st.integers(0, 2**20))
def test_an_order_of_slots_changes_nothing(
    case: tuple[torch.Tensor, torch.Tensor, int], seed: int
) -> None:
    first, _, count = case
    ids = first.topk(count, 1).indices
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    weights = torch.softmax(first, 1).gather(1, ids)
    assert torch.equal(expert_sets(ids, first.shape[1]), expert_sets(ids[:, order], first.shape[1]))
    assert torch.equal(
        by_expert(ids, weights, first.shape[1]),
        by_expert(ids[:, order], weights[:, order], first.shape[1]),
    )


@given(two_logits())
def test_margins_are_those_of_the_pair_farthest_apart(
    case: tuple[torch.Tensor, torch.Tensor, int],
) -> None:
    first, second, count = case
    a, b = largest(first, count), largest(second, count)
    found = margins(a, b, (first, second))
    turned = margins(b, a, (second, first))
    assert torch.equal(found, turned.flip(1))
    for row in range(len(first)):
        only_a = (a & ~b)[row].nonzero().flatten().tolist()
        only_b = (b & ~a)[row].nonzero().flatten().tolist()
        if not only_a:
            assert bool(found[row].isinf().all())
            continue
        ours = [float(first[row, x] - first[row, y]) for x in only_a for y in only_b]
        theirs = [float(second[row, y] - second[row, x]) for x in only_a for y in only_b]
        assert found[row].tolist() == pytest.approx([max(ours), max(theirs)])
        # each choice follows from its own logits, so each pair has changed places
        assert min(ours) >= 0 and min(theirs) >= 0
        # and no pair is farther apart than the two sides' logits are from one another
        moved = float((first - second)[row].abs().max())
        assert float(found[row].max()) <= 2 * moved + 1e-9


@given(
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.booleans(), st.floats(0, 20)),
        min_size=1,
        max_size=20,
    ),
    st.floats(0.01, 2),
)
def test_each_flip_has_one_cause(flips: list[tuple[bool, bool, bool, float]], noise: float) -> None:
    before, fault, crossing, size = (list(column) for column in zip(*flips, strict=True))
    found = causes_of(
        rerouted=torch.tensor(before),
        at_fault=torch.tensor(fault),
        crossing=torch.tensor(crossing),
        margin=torch.tensor(size, dtype=torch.float64),
        noise=noise,
    )
    for at, (was, wrong, cross, margin) in enumerate(flips):
        near = margin <= TIE_MARGIN * noise or not cross
        expected = (
            "unexplained"
            if wrong
            else "consequence"
            if was
            else "near tie"
            if near
            else "inherited"
        )
        assert CAUSES[int(found[at])] == expected


def test_logits_differ_by_their_typical_difference() -> None:
    draw = torch.Generator().manual_seed(0)
    first = torch.randn(400, 16, generator=draw)
    second = first + 0.01 * torch.randn(400, 16, generator=draw)
    assert logits_differ(first, second) == pytest.approx(0.01, rel=0.05)
    # neither a few rows that are far off nor what is added to a whole row counts
    second[:20] += torch.randn(20, 16, generator=draw)
    second += torch.randn(400, 1, generator=draw)
    assert logits_differ(first, second) == pytest.approx(0.01, rel=0.1)
    assert logits_differ(first[:0], second[:0]) is None
    assert logits_differ(first[:1], torch.full((1, 16), torch.inf)) is None


def test_weights_are_matched_by_expert() -> None:
    ids = (torch.tensor([[0, 2], [1, 3]]), torch.tensor([[2, 0], [3, 2]]))
    weights = (torch.tensor([[0.6, 0.4], [0.7, 0.3]]), torch.tensor([[0.4, 0.5], [0.8, 0.2]]))
    sets = [expert_sets(one, 4) for one in ids]
    laid = [by_expert(one, w, 4) for one, w in zip(ids, weights, strict=True)]
    found = shared_weights_differ(sets[0], sets[1], (laid[0], laid[1]))
    # expert 0 and 2 of the first row, expert 3 of the second
    assert found.tolist() == pytest.approx([0.1, 0.0, 0.5])


def test_numbers_that_are_no_expert_s_are_in_no_set() -> None:
    ids = torch.tensor([[1, -1], [5, 2], [3, 3]])
    assert expert_sets(ids, 4).nonzero().tolist() == [[0, 1], [1, 2], [2, 3]]
    assert by_expert(ids, torch.ones(3, 2), 4).sum() == 3


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=8), max_size=5))
def test_a_sequence_is_rerouted_from_its_first_flip_on(sequences: list[list[bool]]) -> None:
    flat = torch.tensor([flip for one in sequences for flip in one], dtype=torch.bool)
    found = rerouted_so_far(flat, tuple(map(len, sequences))).tolist()
    expected = [bool(np.any(one[: at + 1])) for one in sequences for at in range(len(one))]
    assert found == expected
