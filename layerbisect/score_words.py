"""What figures of scores mean, in the words that the terminal and the page share."""

from __future__ import annotations

import math

from layerbisect.bisect.scores.report import Effect, RepeatReport, ScoreReport
from layerbisect.wording import count, percent


def exact(value: float, digits: int = 6) -> str:
    """Write a difference, with the six decimals of the published tables where there is room."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1e3 else f"{value:.{digits - 2}g}"


def positions(start: int, stop: int) -> str:
    """Write a range of positions, ``stop`` not counted in."""
    return f"{start:,}" if stop - start == 1 else f"{start:,}-{stop - 1:,}"


def amount(scores: ScoreReport) -> str:
    """Say how much was compared."""
    return f"{count(scores.tokens, 'token')} of {count(scores.responses, 'response')}"


def repeat_pairs(repeat: RepeatReport) -> str:
    """Name the passes that were compared, a few of them where they are many."""
    return ", ".join(repeat.pairs[:3]) + (" ..." if len(repeat.pairs) > 3 else "")


def ratio_words(effect: Effect) -> str:
    """Say how large the importance ratio is."""
    return (
        f"ratio {exact(effect.ratio_mean, 4)} in the mean, {effect.ratio_min:.3g} to "
        f"{effect.ratio_max:.3g}"
    )


def clipped_words(effect: Effect) -> str:
    """Say how many tokens the loss clips."""
    return (
        f"{percent(effect.clipped_low + effect.clipped_high)} of tokens clipped at "
        f"{effect.epsilon:g} ({percent(effect.clipped_low)} below, "
        f"{percent(effect.clipped_high)} above)"
    )


def sample_words(effect: Effect) -> str:
    """Say how many tokens and responses the ratios leave."""
    return (
        f"effective sample size {percent(effect.effective_sample_size)} of tokens, "
        f"{percent(effect.effective_responses)} of responses"
    )


def divergence_words(effect: Effect) -> str:
    """Say how far the trainer is from the rollout (nat a token)."""
    return f"KL a token: k1 {effect.k1:+.6f}, k3 {effect.k3:.6f} nat"
