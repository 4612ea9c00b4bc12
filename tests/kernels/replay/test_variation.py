"""How outputs change with repeats, other batches and chunks, told to the row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from layerbisect.kernels.replay.bundle import Bundle
from layerbisect.kernels.replay.replayer import replay
from layerbisect.kernels.replay.report import Result
from tests.kernels.replay.test_replayer import FAKES, bundles_of

if TYPE_CHECKING:
    from tests.bisect.conftest import Clean


@pytest.fixture(scope="module")
def bundles(clean: Clean) -> dict[str, Bundle]:
    return bundles_of(clean.rollout, clean.model)


def results(bundle: Bundle, *names: str) -> list[Result]:
    found = replay(bundle, names=names, isolate=False, known=FAKES, repeats=4)
    assert all(result.state == "ran" for result in found.results), found.results
    return list(found.results)


def test_repeats(bundles: dict[str, Bundle]) -> None:
    right, unrepeatable = results(bundles["attn.out"], "right", "unrepeatable")
    assert right.repeats and right.repeats.none
    assert right.repeats.how == "4 runs of the same 64 rows"
    assert unrepeatable.repeats and not unrepeatable.repeats.none
    assert (unrepeatable.repeats.rows, unrepeatable.repeats.of) == (1, 64)
    assert 0 < unrepeatable.repeats.max_ulps <= 1


def test_batches(bundles: dict[str, Bundle]) -> None:
    right, by_batch, spoils = results(
        bundles["attn.out"], "right", "by_batch", "writes_into_its_input"
    )
    assert right.batches and right.batches.none and right.batches.of == 64
    assert right.batches.how == (
        "8 rows alone, 64 in two halves and shuffled, against all 144 in one batch"
    )
    assert by_batch.batches and by_batch.batches.rows == 8
    assert by_batch.repeats and by_batch.repeats.none
    # its input is its own copy
    assert spoils.repeats and spoils.repeats.none
    assert spoils.reproduces and spoils.reproduces.exact


def test_what_refuses_a_batch_is_not_varied(bundles: dict[str, Bundle]) -> None:
    (result,) = results(bundles["attn.out"], "refuses_one_row")
    assert result.batches is None and result.errors
    assert result.why == "in other batches: refuses_one_row does not support rows=1"


def test_chunks(bundles: dict[str, Bundle]) -> None:
    whole, by_chunk, refusing = results(bundles["attn.context"], "attend", "by_chunk", "no_chunks")
    assert whole.chunks and whole.chunks.none
    # two sequences of 48 rows, the first chunk of which is a whole prefill
    assert whole.chunks.of == 96
    assert whole.chunks.how == (
        "2 sequences of up to 48 in 3 chunks, and 8 positions of each decoded one by one, against "
        "their whole prefill"
    )
    assert by_chunk.chunks and 50 < by_chunk.chunks.rows < 80
    assert by_chunk.batches and by_chunk.batches.none
    assert by_chunk.batches.how.startswith("2 sequences alone, 2 in two halves")
    assert refusing.chunks is None
    assert refusing.why.startswith("in chunks: no_chunks does not support queries=")


def test_one_sequence_alone_has_no_other_batch(bundles: dict[str, Bundle]) -> None:
    (result,) = results(bundles["attn.context"].only([1]), "attend")
    assert result.batches is None and result.why == ""
    assert result.chunks and result.chunks.of == 48


def test_short_sequences_are_chunked_as_far_as_they_go(bundles: dict[str, Bundle]) -> None:
    whole = bundles["attn.context"]
    # the first rows of each sequence are sequences too
    rows = torch.tensor([0, 48, 49, *range(96, 103)])
    (call,) = whole.calls
    lengths = (1, 2, 7)
    short = replace(
        whole,
        calls=(replace(call, attributes={**call.attributes, "lengths": lengths}),),
        inputs={n: t[rows] for n, t in whole.inputs.items()},
        captured={n: t[rows] for n, t in whole.captured.items()},
        position=whole.position[rows],
        token=whole.token[rows],
        observed=torch.arange(10),
    )
    (result,) = results(short, "attend")
    assert result.chunks and result.chunks.none and result.chunks.of == 10


def test_the_reference_is_varied_too(bundles: dict[str, Bundle]) -> None:
    (result,) = results(bundles["attn.context"], "reference")
    assert result.chunks and result.chunks.of == 96
    (hidden,) = results(bundles["attn.q"], "right")
    assert hidden.chunks is None
