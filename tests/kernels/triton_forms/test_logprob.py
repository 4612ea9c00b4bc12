"""The Triton forms of log-softmax and gather: right, and batch-invariant where they say so."""

from __future__ import annotations

import pytest
import torch

from layerbisect.kernels.bounds.logprob import logprob_bound
from layerbisect.kernels.replay.implementation import Unsupported

pytest.importorskip("triton")

from layerbisect.kernels.triton_forms import logprob as module  # noqa: E402
from layerbisect.kernels.triton_forms.logprob import logprob  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def made(
    rows: int, vocab: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, vocab, generator=generator)
    targets = torch.randint(vocab, (rows,), generator=generator)
    return logits.to(device, dtype), targets.to(device)


def exact(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "shards"), [(1, 60, 1), (1, 5001, 1), (1, 5001, 8), (63, 128, 1), (63, 60, 3)]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_is_exact_within_the_bound(
    dtype: torch.dtype, rows: int, vocab: int, shards: int, deterministic: bool, device: str
) -> None:
    logits, targets = made(rows, vocab, dtype, device)
    score = logprob(logits, targets, deterministic=deterministic, shards=shards)
    assert score.dtype == torch.float32
    bound = logprob_bound(logits, targets, dtype=dtype, shards=shards)
    assert bool(((score.double() - exact(logits, targets)).abs() <= bound).all())


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_thousand_rows(deterministic: bool, device: str) -> None:
    logits, targets = made(1000, 60, torch.bfloat16, device)
    score = logprob(logits, targets, deterministic=deterministic)
    bound = logprob_bound(logits, targets, dtype=logits.dtype)
    assert bool(((score.double() - exact(logits, targets)).abs() <= bound).all())
    if deterministic:
        some = logprob(logits[900:963], targets[900:963], deterministic=True)
        assert torch.equal(some, score[900:963])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shards", [1, 3])
def test_deterministic_gives_a_row_the_same_bits_in_any_batch(
    dtype: torch.dtype, shards: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # several parts a shard, of several blocks each
    monkeypatch.setattr(module, "_BLOCK", 64)
    monkeypatch.setattr(module, "_FIXED_LENGTH", 128)
    logits, targets = made(20, 301, dtype, device)

    def score(rows: slice | torch.Tensor) -> torch.Tensor:
        return logprob(logits[rows], targets[rows], deterministic=True, shards=shards)

    whole = score(slice(None))
    assert torch.equal(score(slice(None)), whole)
    for rows in (slice(0, 1), slice(17, 18), slice(3, 12)):
        assert torch.equal(score(rows), whole[rows])
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(score(order), whole[order])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fast_gives_a_row_other_bits_in_another_batch(dtype: torch.dtype, device: str) -> None:
    logits, targets = made(64, 1001, dtype, device)
    whole = logprob(logits, targets, deterministic=False)[:16]
    alone = [logprob(logits[i : i + 1], targets[i : i + 1], deterministic=False) for i in range(16)]
    assert not torch.equal(torch.cat(alone), whole)


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_no_token_gets_nan(deterministic: bool, device: str) -> None:
    logits, targets = made(4, 60, torch.bfloat16, device)
    targets[1], targets[2] = -1, 60
    score = logprob(logits, targets, deterministic=deterministic)
    assert score.isnan().nonzero().flatten().tolist() == [1, 2]


@pytest.mark.parametrize("deterministic", [False, True])
def test_masked_tokens_add_nothing_and_have_no_chance(deterministic: bool, device: str) -> None:
    logits, targets = made(3, 3000, torch.float32, device)
    logits[:, 1000:] = -torch.inf
    targets = targets % 1000
    score = logprob(logits, targets, deterministic=deterministic, shards=2)
    bound = logprob_bound(logits, targets, dtype=torch.float32)
    assert bool(((score.double() - exact(logits, targets)).abs() <= bound).all())
    assert logprob(logits, targets + 1000, deterministic=deterministic).tolist() == [-torch.inf] * 3


def test_nan_logits_are_not_hidden(device: str) -> None:
    logits, targets = made(3, 60, torch.float32, device)
    logits[1, 7] = torch.nan
    score = logprob(logits, targets, deterministic=True)
    assert score.isnan().tolist() == [False, True, False]


def test_no_rows_and_refusals() -> None:
    logits, targets = made(2, 5, torch.float32, "cpu")
    assert logprob(logits[:0], targets[:0], deterministic=True).shape == (0,)
    with pytest.raises(ValueError, match=r"\[2, 5\] and \[1\]"):
        logprob(logits, targets[:1], deterministic=True)
    with pytest.raises(ValueError, match="shards must be at least 1, got 0"):
        logprob(logits, targets, deterministic=True, shards=0)
    with pytest.raises(Unsupported, match="logits must be .* got torch.float64"):
        logprob(logits.double(), targets, deterministic=True)
