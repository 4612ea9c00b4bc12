"""The bound of a log-probability holds for all the ways to compute it, and not for wrong ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from layerbisect.kernels.bounds.logprob import logprob_bound

Scores = Callable[[torch.Tensor], torch.Tensor]


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1)


def log_of_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1).log()


def less_logsumexp(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.logsumexp(-1, keepdim=True)


def online(logits: torch.Tensor) -> torch.Tensor:
    peak, total = logits[:, :1], torch.ones(len(logits), 1)
    for column in logits[:, 1:].unbind(1):
        higher = torch.maximum(peak, column[:, None])
        total = total * (peak - higher).exp() + (column[:, None] - higher).exp()
        peak = higher
    return logits - peak - total.log()


def made(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3000, generator=generator)
    if kind == "flat":
        logits *= 1e-3
    elif kind == "rising":
        # every term makes the sum be scaled anew
        logits = logits.mul(4).sort(-1).values
    elif kind == "far":
        logits = logits * 5 + 300
    return logits


@pytest.mark.parametrize("scores", [log_softmax, log_of_softmax, less_logsumexp, online])
@pytest.mark.parametrize("kind", ["ordinary", "flat", "rising", "far"])
def test_holds_for_every_way_to_compute_it(scores: Scores, kind: str) -> None:
    logits = made(kind)
    targets = torch.tensor([0, 1, 1500, 2998, 2999])
    exact = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    error = (scores(logits).gather(1, targets[:, None])[:, 0].double() - exact).abs()
    bound = logprob_bound(logits, targets, dtype=torch.float32)
    assert bool((error <= bound).all())


def test_temperature_of_a_thousandth_more_and_a_missing_token_are_outside() -> None:
    logits = 4 * made("ordinary")
    targets = torch.arange(5)
    exact = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    bound = logprob_bound(logits, targets, dtype=torch.bfloat16)
    warm = (logits / 1.001).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert bool(((warm - exact).abs() > bound).all())
    logits[:, logits.shape[1] // 2 :] = -torch.inf
    half = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert bool(((half - exact).abs() > bound).all())


def test_masked_tokens_add_nothing_and_no_target_has_no_bound() -> None:
    logits = made("ordinary")
    logits[:, 100:] = -torch.inf
    targets = torch.tensor([-1, 1, 2, 3, 4])
    bound = logprob_bound(logits, targets, dtype=torch.float32)
    assert bound.isnan().tolist() == [True, False, False, False, False]
    assert bool((bound[1:] < 1e-4).all())
