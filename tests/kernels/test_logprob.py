"""Log-probabilities against a whole log-softmax, in any tiling."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels import logprob as module
from layerbisect.kernels.linear import linear
from layerbisect.kernels.logprob import logprobs

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
