"""What score arrays say: pairs, repeats, shapes, and what the gap does to training.

Every name carries its order: ``A-B0`` is A minus B0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from layerbisect.bisect.scores.split import SplitReport
from layerbisect.bisect.token_report import Distribution
from layerbisect.bisect.verdict import Gap
from layerbisect.captures.record.call import GRADIENT

RepeatKind = Literal["one worker", "workers", "router", "trainer"]


@dataclass(frozen=True, slots=True)
class TokenGap:
    """One response token's scores (nat), and first minus second.

    ``position`` counts from the response's first token.
    """

    call: str
    position: int
    token: int
    first: float
    second: float
    difference: float


@dataclass(frozen=True, slots=True)
class PositionGap:
    """The gap over response positions ``start`` to ``stop - 1`` (nat)."""

    start: int
    stop: int
    tokens: int
    mae: float
    signed_mean: float


@dataclass(frozen=True, slots=True)
class PairReport:
    """Two columns' difference, ``first`` minus ``second``, over the tokens that the mask keeps.

    ``name`` carries the order of the subtraction, such as ``A-B0``.
    ``first_token`` is of response position 0 alone and ``later`` of all others: a response's first
    token comes from prefill and the others from decode. ``worst`` are the largest differences.
    ``exact_quantiles`` is False where p95 and p99 come from a histogram, within 0.1 %.
    ``distribution`` counts the signed differences.
    """

    name: str
    first: str
    second: str
    gap: Gap
    first_token: Gap | None
    later: Gap | None
    by_position: tuple[PositionGap, ...]
    worst: tuple[TokenGap, ...]
    exact_quantiles: bool = True
    distribution: Distribution | None = None


@dataclass(frozen=True, slots=True)
class RepeatReport:
    """How repeats of one column differ where nothing relevant changed (nat).

    ``kind`` says what the repeats share: one worker, none (over workers), or a router that chose
    the worker. ``mae`` is the mean over all ``pairs`` of passes. ``moved`` are the tokens whose
    repeats differ by more than ``tolerance``, the worst first; ``moved_tokens`` counts all.
    """

    letter: Literal["B", "C"]
    kind: RepeatKind
    pairs: tuple[str, ...]
    mae: float
    max: float
    tolerance: float
    moved_tokens: int
    moved: tuple[TokenGap, ...]


@dataclass(frozen=True, slots=True)
class Effect:
    """What the gap does to a loss that divides trainer by rollout probabilities.

    With ratio r = exp(C - A) by token: ``ratio_mean``, ``ratio_min``, ``ratio_max``;
    ``clipped_low`` and ``clipped_high``, the shares of tokens below 1 - epsilon and above
    1 + epsilon; ``effective_sample_size`` is (sum r)^2 / (n sum r^2), 1 where all are 1, and
    ``effective_responses`` the same over responses, with the product of a response's ratios.
    ``k1`` is the mean of A - C and ``k3`` that of r - 1 - log r: estimates of the divergence
    KL(rollout || trainer) in nats a token (http://joschu.net/blog/kl-approx.html).
    """

    rollout: str
    trainer: str
    tokens: int
    epsilon: float
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    clipped_low: float
    clipped_high: float
    effective_sample_size: float
    effective_responses: float
    k1: float
    k3: float


@dataclass(frozen=True, slots=True)
class Finding:
    """A shape that a difference of scores has.

    Attributes:
        test: the name of the test that found it, such as ``constant offset``.
        pair: the difference it was found in, such as ``A-B0``.
        side: the column letter that carries it (``A``, ``B`` or ``C``), or None where one pair
            alone cannot tell.
        summary: what was found, with its estimate: ``A is lower by 0.100 nat from position 1 on``.
        evidence: sentences with the numbers behind it.
        false_alarm: chance that a pair without this fault shows as much, all tries of this test
            (lags, periods, ...) counted in.
        explains: share of the absolute gap that is gone once the shape is taken out, 0 to 1.
        tokens: how many tokens it touches, and ``mae`` the mean absolute difference there (nat).
        where: which tokens, such as ``response positions >= 1``, or "" for all.
    """

    test: str
    pair: str
    side: str | None
    summary: str
    evidence: tuple[str, ...]
    false_alarm: float
    explains: float
    tokens: int
    mae: float
    where: str = ""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step's pairs: mean absolute differences by name.

    ``weights`` are digests of what scored, by side, and ``versions`` the names that sides gave it.
    """

    step: int | None
    maes: Mapping[str, float]
    weights: Mapping[str, str]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """All that was judged from scores.

    ``floors`` are the tolerances that the observed repeats give, by pair; ``silent`` names the
    tests for shapes that found nothing, and ``sampled`` counts the responses that the tests saw.
    ``closing`` is the largest |(A-C) - ((A-B) + (B-C))| over tokens. ``splits`` are of the pairs
    that have chosen logits on both sides.
    """

    tolerance: float
    responses: int
    tokens: int
    pairs: tuple[PairReport, ...]
    repeats: tuple[RepeatReport, ...]
    floors: Mapping[str, float]
    closing: float | None
    effect: Effect | None
    findings: tuple[Finding, ...]
    silent: tuple[str, ...]
    sampled: int
    splits: tuple[SplitReport, ...] = ()
    steps: tuple[StepReport, ...] = ()

    @property
    def between(self) -> tuple[PairReport, ...]:
        """The gaps among A, B and C."""
        return tuple(pair for pair in self.pairs if pair is not self.gradient)

    @property
    def gradient(self) -> PairReport | None:
        """The gap from the frozen C to the gradient-enabled one, where that was scored."""
        return next((pair for pair in self.pairs if pair.second == GRADIENT), None)

    @property
    def unrepeated(self) -> tuple[RepeatReport, ...]:
        """The repeats of which a token moved."""
        return tuple(report for report in self.repeats if report.moved_tokens)
