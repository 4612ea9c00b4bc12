"""Assembling a tensor from the parts that ranks hold."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import TensorHeader
from layerbisect.captures.shards import Piece, assemble

DIMS = ("row", "head", "channel")


def piece(
    values: NDArray[Any],
    rows: object = None,
    *,
    dims: tuple[str, ...] = DIMS,
    shards: Mapping[str, tuple[int, int, int]] | None = None,
    partial: tuple[int, int] | None = None,
    dtype: str = "F32",
    source: str = "rank-0",
) -> Piece:
    at = np.arange(len(values)) if rows is None else np.asarray(rows, np.intp)
    return Piece(TensorHeader(dims, shards or {}, partial), at, values, dtype, source)


def cuts(data: st.DataObject, size: int) -> list[tuple[int, int]]:
    """Cut a range into contiguous parts, by chance."""
    inner = data.draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
    edges = [0, *sorted(inner), size]
    return list(zip(edges, edges[1:], strict=False))


@given(st.data())
def test_parts_over_ranks_assemble_to_the_whole(data: st.DataObject) -> None:
    num_rows, heads, channels = (data.draw(st.integers(1, n)) for n in (5, 6, 4))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    whole = random.standard_normal((num_rows, heads, channels)).astype(np.float32)
    owner = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows)))
    pieces = []
    # context parallel cuts the rows, tensor parallel heads and channels, and each part may be held
    # by several ranks
    for group in np.unique(owner):
        rows = data.draw(st.permutations(np.flatnonzero(owner == group).tolist()))
        for a, b in cuts(data, heads):
            for c, d in cuts(data, channels):
                shards = {"head": (a, b, heads), "channel": (c, d, channels)}
                part = piece(whole[rows, a:b, c:d], rows, shards=shards)
                pieces += [part] * data.draw(st.integers(1, 2))
    result = assemble(data.draw(st.permutations(pieces)), num_rows)
    np.testing.assert_array_equal(result.values, whole)
    assert result.disagreements == ()


@given(st.data())
def test_a_missing_part_is_refused(data: st.DataObject) -> None:
    whole = np.zeros((3, 6, 2), np.float32)
    parts = [piece(whole[:, a:b], shards={"head": (a, b, 6)}) for a, b in [(0, 1), (1, 4), (4, 6)]]
    parts.pop(data.draw(st.integers(0, 2)))
    with pytest.raises(CaptureError, match=r"do not tile it: \d+% of the values are on no rank"):
        assemble(parts, 3)


def test_missing_rows_are_refused() -> None:
    values = np.zeros((2, 6, 2), np.float32)
    with pytest.raises(CaptureError, match="do not tile it"):
        assemble([piece(values, [0, 2])], 3)
    with pytest.raises(CaptureError, match="do not tile it"):
        assemble([piece(values, [0, 2]), piece(values[:0], [])], 3)


@pytest.mark.parametrize("second", [(1, 4), (0, 4)])
def test_an_overlap_that_is_no_replica_is_refused(second: tuple[int, int]) -> None:
    whole = np.zeros((3, 4, 2), np.float32)
    parts = [
        piece(whole[:, a:b], shards={"head": (a, b, 4)}, source=f"rank-{i}")
        for i, (a, b) in enumerate([(0, 2), second, (2, 4)])
    ]
    with pytest.raises(CaptureError, match="overlap without being replicas: rank-1 holds"):
        assemble(parts, 3)


def test_replicas_that_differ_are_reported_and_the_first_is_kept() -> None:
    a = np.zeros((2, 1, 2), np.float32)
    a[0, 0, 0] = np.nan
    b = a.copy()
    assert assemble([piece(a), piece(b)], 2).disagreements == ()
    b[1, 0, 1] = 3
    result = assemble([piece(a), piece(b, source="rank-1")], 2)
    np.testing.assert_array_equal(result.values, a)
    assert result.disagreements == (
        "replicas disagree: rank-1 differs in 1 values of 1 rows from a rank that holds the same "
        "part",
    )


def test_totals_and_dims_that_disagree_are_refused() -> None:
    values = np.zeros((2, 2, 2), np.float32)
    with pytest.raises(
        CaptureError, match=r"rank-1 has .* of \[2, 5, 2\], and rank-0 .*\[2, 4, 2\]"
    ):
        assemble(
            [
                piece(values, shards={"head": (0, 2, 4)}),
                piece(values, shards={"head": (2, 4, 5)}, source="rank-1"),
            ],
            2,
        )
    with pytest.raises(CaptureError, match="rank-1 has"):
        assemble([piece(values), piece(values, dims=("row", "a", "b"), source="rank-1")], 2)


@given(
    st.sampled_from([("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)]),
    st.integers(1, 5),
    st.integers(0, 10**6),
)
def test_partial_sums_round_as_torch_does(
    kind: tuple[str, torch.dtype], count: int, seed: int
) -> None:
    name, dtype = kind
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-6, 6, (4, 3), generator=generator)
    parts = [(torch.randn(4, 3, generator=generator) * scale).to(dtype) for _ in range(count)]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    pieces = [
        piece(p.float().numpy(), dims=("row", "hidden"), partial=(i, count), dtype=name)
        for i, p in enumerate(parts)
    ]
    result = assemble(pieces[::-1], 4)
    np.testing.assert_array_equal(result.values, total.to(dtype).float().numpy())


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_rounding_any_bits_to_bfloat16_is_torchs(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)[:, None]
    zero = np.zeros_like(values)
    pieces = [
        piece(v, dims=("row", "hidden"), partial=(i, 2), dtype="BF16")
        for i, v in enumerate([values, zero])
    ]
    got = assemble(pieces, len(values)).values
    expected = (torch.from_numpy(values) + 0.0).bfloat16().float().numpy()
    np.testing.assert_array_equal(got, expected)


def test_partial_sums_keep_float64_and_tile_first() -> None:
    whole = np.arange(8, dtype=np.float64).reshape(4, 2) + 1e-12
    pieces = [
        piece(whole[a:b] / 2, range(a, b), dims=("row", "hidden"), partial=(i, 2), dtype="F64")
        for i in (0, 1)
        for a, b in ((0, 3), (3, 4))
    ]
    np.testing.assert_array_equal(assemble(pieces, 4).values, whole)


def test_partial_sums_of_infinities_are_nan_without_a_warning() -> None:
    values = np.array([[np.inf, np.inf, 6e4]], np.float32)
    other = np.array([[-np.inf, 1, 6e4]], np.float32)
    pieces = [
        piece(v, dims=("row", "hidden"), partial=(i, 2), dtype="F16")
        for i, v in enumerate([values, other])
    ]
    np.testing.assert_array_equal(assemble(pieces, 1).values, [[np.nan, np.inf, np.inf]])


@pytest.mark.parametrize(
    ("partials", "sentence"),
    [
        ([(0, 2)], "partial sum 1 of 2 is missing"),
        ([(1, 2)], "partial sum 0 of 2 is missing"),
        ([(0, 2), None], "some ranks hold partial sums of it and others do not"),
        ([(0, 2), (1, 3)], "some ranks"),
    ],
)
def test_partial_sums_that_do_not_add_up_are_refused(
    partials: list[tuple[int, int] | None], sentence: str
) -> None:
    values = np.zeros((1, 2), np.float32)
    with pytest.raises(CaptureError, match=sentence):
        assemble([piece(values, dims=("row", "hidden"), partial=p) for p in partials], 1)


@pytest.mark.parametrize(
    ("dims", "shards", "partial", "sentence"),
    [
        (("hidden", "row"), {}, None, "start with 'row'"),
        ((), {}, None, "start with 'row'"),
        (("row", "a", "a"), {}, None, "distinct"),
        (DIMS, {"vocab": (0, 1, 2)}, None, "shard of 'vocab', which is none of ('row', 'head'"),
        (DIMS, {"head": (1, 1, 2)}, None, "shard head=[1, 1) does not lie within"),
        (DIMS, {"head": (0, 3, 2)}, None, "shard head=[0, 3) does not lie within its total of 2"),
        (DIMS, {}, (2, 2), "partial_sum (2, 2)"),
    ],
)
def test_a_part_that_cannot_be_is_refused(
    dims: tuple[str, ...],
    shards: dict[str, tuple[int, int, int]],
    partial: tuple[int, int] | None,
    sentence: str,
) -> None:
    with pytest.raises(CaptureError, match=re.escape(sentence)):
        TensorHeader(dims, shards, partial)


@pytest.mark.parametrize(("factor", "rounding"), [(1 + 2**-8, True), (1.05, False)])
def test_replicas_that_differ_by_a_rounding_are_told_apart(factor: float, rounding: bool) -> None:
    """Ranks that add in another order differ by a rounding; that is a finding, and no fault."""
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    other = (values.float() * factor).bfloat16()
    pieces = [
        piece(v.float().numpy(), dims=("row", "hidden"), dtype="BF16", source=f"rank-{i}")
        for i, v in enumerate((values, other))
    ]
    (told,) = assemble(pieces, 4).disagreements
    assert told.startswith("replicas disagree: rank-1") and told.rounding is rounding
