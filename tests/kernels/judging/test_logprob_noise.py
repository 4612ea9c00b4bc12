"""Long sums in float32 are rounding: clean heads of any vocabulary are acquitted, others not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from layerbisect.kernels.judging.logprob_noise import logprob_noise
from layerbisect.kernels.judging.measure import Output, measure
from layerbisect.kernels.judging.own_error import OwnError

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ROWS = 64


def _own(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, targets[:, None])[:, 0]


def eager(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _own(logits.log_softmax(-1), targets)


def normaliser_less(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _own(logits, targets) - logits.logsumexp(-1)


def chunked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As an online softmax goes through it: the sum is scaled anew as the maximum grows."""
    peak = torch.full((len(logits),), -torch.inf)
    total = torch.zeros(len(logits))
    for part in logits.split(1000, 1):
        higher = peak.maximum(part.amax(1))
        total = total * (peak - higher).exp() + (part - higher[:, None]).exp().sum(1)
        peak = higher
    return _own(logits, targets) - (peak + total.log())


def in_lanes(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As few partial sums as a vector register has lanes, each added up one by one."""
    peak = logits.amax(1, keepdim=True)
    terms = (logits - peak).exp()
    lanes = torch.zeros(len(logits), 8)
    for step in terms.split(8, 1):
        lanes[:, : step.shape[1]] += step
    return _own(logits, targets) - peak[:, 0] - lanes.sum(1).log()


SCORES: tuple[Score, ...] = (eager, normaliser_less, chunked)


def judged(
    logits: torch.Tensor,
    exact_logits: torch.Tensor,
    scores: tuple[Score, ...] = SCORES,
    *,
    seed: int = 0,
    hidden: int = 0,
    scale: float = 1.0,
) -> list[OwnError]:
    """Judge what each of ``scores`` makes of float32 logits [row, vocab], times ``scale``."""
    draw = torch.Generator().manual_seed(seed)
    targets = exact_logits.softmax(-1).multinomial(1, generator=draw)[:, 0]
    exact = eager(exact_logits, targets)
    # the low-precision reference of a float32 side sums in float64
    low = eager(exact_logits.float().double(), targets)
    own = _own(exact_logits, targets)
    tiles = exact_logits.split(20_000, 1)
    noise = logprob_noise(tiles, own, exact, low, "float32", hidden=hidden)[:, None]
    moved = own - (exact_logits.softmax(-1) * exact_logits).sum(1)
    return [
        measure(
            Output(
                point="logprob",
                layer=None,
                operator="head",
                side="rollout",
                dtype="float32",
                captured=score(logits * scale, targets).double()[:, None],
                exact=exact[:, None],
                low=low[:, None],
                flat_rows=torch.arange(len(exact)),
                covers=("head",),
                directions={
                    "logit scale": moved[:, None],
                    "offset": torch.ones_like(exact)[:, None],
                },
                noise=noise,
            )
        )
        for score in scores
    ]


def given(vocab: int, seed: int, spread: float, rows: int = ROWS) -> torch.Tensor:
    """Float32 logits: a bulk of ``spread``, and a few tokens above it where a row is sure."""
    draw = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(rows, vocab, generator=draw) - 2.0
    sure = torch.arange(rows) % 3 == 0
    logits[sure, :4] += 4 * spread + torch.randn(int(sure.sum()), 4, generator=draw)
    return logits


SPREADS = (0.5, 1.5, 2.5, 4.0)


@pytest.mark.parametrize(("vocab", "draws"), [(512, 200), (2_048, 200), (49_152, 8), (151_936, 4)])
def test_clean_scores_of_given_logits_are_acquitted(vocab: int, draws: int) -> None:
    worst = 0.0
    for seed in range(draws):
        logits = given(vocab, seed, SPREADS[seed % 4], ROWS if vocab < 9_999 else 24)
        for error in judged(logits, logits.double(), seed=seed):
            assert not error.convicted, (seed, error.median, error.ratio, error.fits)
            worst = max(worst, float(error.row_ratio.max()))
    # and far from it, row by row
    assert worst < 4.0


@pytest.mark.parametrize(
    ("vocab", "hidden", "draws"), [(512, 64, 60), (2_048, 4_096, 8), (49_152, 576, 3)]
)
def test_clean_heads_are_acquitted(vocab: int, hidden: int, draws: int) -> None:
    for seed in range(draws):
        x, logits, exact = head(vocab, hidden, seed, SPREADS[seed % 4])
        for error in judged(logits, exact, seed=seed, hidden=hidden):
            assert not error.convicted, (seed, error.median, error.ratio, error.fits)
            # a token whose weights are large where the hidden state is sums more than is typical
            assert float(error.row_ratio.max()) < 6.0 and error.ratio < 2.5


def head(
    vocab: int, hidden: int, seed: int, spread: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states with a massive channel, and what a float32 and an exact head make of them."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, hidden, generator=draw)
    x[:, 3] *= 20
    weight = torch.randn(vocab, hidden, generator=draw) * spread
    weight /= x.square().sum(1).mean().sqrt()
    return x, x @ weight.T, x.double() @ weight.double().T


@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_few_partial_sums_are_acquitted(spread: float) -> None:
    # no engine keeps fewer
    logits = given(49_152, 0, spread, 24)
    (error,) = judged(logits, logits.double(), (in_lanes,))
    assert not error.convicted and float(error.row_ratio.max()) < 3.0


@pytest.mark.parametrize("vocab", [512, 2_048, 49_152, 151_936])
@pytest.mark.parametrize("scale", [1.0001, 0.9999])
def test_a_logit_scale_of_a_ten_thousandth_is_found(vocab: int, scale: float) -> None:
    for seed, spread in enumerate(SPREADS):
        logits = given(vocab, seed, spread, 24)
        for error in judged(logits, logits.double(), seed=seed, hidden=4_096, scale=scale):
            assert error.convicted and error.median > 2.0, (spread, error.median)
            assert error.smallest_gain is not None


def test_what_is_said_of_the_smallest_scale_is_so() -> None:
    logits = given(2_048, 0, 2.5)
    (clean,) = judged(logits, logits.double(), (eager,))
    said = clean.smallest_gain
    assert said is not None and said < 1e-5
    exact = logits.double()

    def scaled(share: float) -> bool:
        # rounded once, as logits are
        wrong = (exact * (1 + share * said)).float()
        return judged(wrong, exact, (eager,))[0].convicted

    assert scaled(1.5) and scaled(-1.5) and not scaled(0.25) and not scaled(-0.25)


def test_a_bfloat16_head_is_known_no_worse_for_it() -> None:
    logits = given(512, 0, 2.5).bfloat16().double()
    targets = logits.argmax(1)
    exact = eager(logits, targets)
    own = _own(logits, targets)
    without, with_sums = (
        logprob_noise([logits], own, exact, exact, "bfloat16", hidden=n) for n in (0, 4_096)
    )
    assert torch.allclose(without, with_sums, rtol=1e-3)
