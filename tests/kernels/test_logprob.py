"""Log-probabilities against a whole log-softmax, in any tiling."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels import logprob as module
from layerbisect.kernels.linear import linear
from layerbisect.kernels.logprob import logprob, logprobs

ROWS, HIDDEN, VOCAB = 13, 24, 101


@pytest.fixture
def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (ROWS,), generator=generator)
    targets[[0, 1]] = torch.tensor([0, VOCAB - 1])
    return hidden, head, targets


def whole(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (hidden @ head.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("chunk", [1, 7, VOCAB, 5 * VOCAB, 10**6])
@pytest.mark.parametrize("tile_elements", [HIDDEN, 10 * HIDDEN, 10**6])
def test_equals_a_log_softmax_in_any_tiling(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    chunk: int,
    tile_elements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TILE_ELEMENTS", tile_elements)
    torch.testing.assert_close(logprobs(*given, chunk=chunk), whole(*given), rtol=1e-12, atol=1e-12)


def test_never_holds_more_logits_than_asked(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = 0

    def watched(*args: torch.Tensor, round_to: torch.dtype | None) -> torch.Tensor:
        nonlocal largest
        logits = linear(*args, round_to=round_to)
        largest = max(largest, logits.numel())
        return logits

    monkeypatch.setattr(module, "linear", watched)
    logprobs(*given, chunk=3 * VOCAB)
    assert 0 < largest <= 3 * VOCAB


def test_negative_targets_get_nan_and_cost_nothing(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    hidden, head, targets = given
    expected = logprobs(*given)
    targets[3], targets[8] = -1, -100
    hidden[3] = torch.nan
    result = logprobs(hidden, head, targets)
    assert result.isnan().nonzero()[:, 0].tolist() == [3, 8]
    assert torch.equal(result[~result.isnan()], expected[~result.isnan()])
    assert logprobs(hidden, head, torch.full((ROWS,), -1)).isnan().all()


def test_low_precision_rounds_the_logits(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    hidden, head, targets = given
    logits = (hidden @ head.T).bfloat16().double()
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    rough = logprobs(*given, round_to=torch.bfloat16)
    torch.testing.assert_close(rough, expected)
    assert not torch.allclose(rough, whole(*given), atol=1e-4)


def test_large_logits_do_not_overflow(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    hidden, head, targets = given
    result = logprobs((hidden * 1e3).float(), head.bfloat16(), targets)
    assert result.dtype == torch.float32
    assert result.isfinite().all()
    assert (result <= 0).all()


def test_wrong_arguments_are_named(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    hidden, head, targets = given
    with pytest.raises(ValueError, match="targets must be below the vocabulary's 100, got 100"):
        logprobs(hidden, head[:100], targets)
    with pytest.raises(ValueError, match=r"got \[13, 24\], \[101, 23\], \[13\]"):
        logprobs(hidden, head[:, :23], targets)
    with pytest.raises(TypeError, match="hidden must be float32 or float64"):
        logprobs(hidden.half(), head, targets)


@pytest.mark.parametrize("shards", [1, 2, 8, VOCAB, 10 * VOCAB])
def test_from_logits_in_any_number_of_shards(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], shards: int
) -> None:
    hidden, head, targets = given
    scores = logprob(hidden @ head.T, targets, shards=shards)
    torch.testing.assert_close(scores, whole(*given), rtol=1e-12, atol=1e-12)


def test_from_logits_equals_from_hidden_states_in_low_precision(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    hidden, head, targets = given
    targets[3] = -1
    scores = logprob(linear(hidden, head), targets, round_to=torch.bfloat16)
    expected = logprobs(hidden, head, targets, round_to=torch.bfloat16)
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert scores.isnan().nonzero().flatten().tolist() == [3]


def test_a_masked_shard_of_the_vocabulary_adds_nothing(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    hidden, head, _ = given
    logits = hidden @ head.T
    half = -(-VOCAB // 2)
    logits[:, half:] = -torch.inf
    targets = torch.arange(ROWS)
    masked = logprob(logits, targets, shards=2)
    torch.testing.assert_close(masked, logprob(logits[:, :half], targets))


def test_from_logits_refuses_what_does_not_fit() -> None:
    logits = torch.zeros(2, 5)
    with pytest.raises(TypeError, match="bfloat16"):
        logprob(logits.bfloat16(), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"\[3\]"):
        logprob(logits, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="below the vocabulary's 5, got 5"):
        logprob(logits, torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="shards must be at least 1, got 0"):
        logprob(logits, torch.tensor([0, 1]), shards=0)
