"""Two runs' differences, prompt by prompt: how likely do two runs alike lie so far apart?

Noise differs from prompt to prompt, and all tokens of a prompt, over all its samples, share it. So
what was drawn independently is prompts, however many tokens they hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.judge import compared_columns
from layerbisect.bisect.shapes.tokens import t_tail
from layerbisect.captures.record.file import ScoreRecord

Array = NDArray[np.float64]
Prompts = Mapping[object, Array]
"""Differences (nat), float64 [token], by prompt."""

FEWEST = 4
"""Fewer prompts than these say too little of how prompts differ."""

_SPREAD = 0.5
_WEIGHT = 2


class Chance(NamedTuple):
    """Upper bound of the chance that a run like the control lies so far above it, and its least."""

    seen: float
    least: float


@dataclass(frozen=True, slots=True)
class Measure:
    """A prompt's value: mean difference where ``signed``, mean absolute difference, or, with a
    ``quantile``, the share of its tokens beyond that quantile of both runs' absolute differences.

    Unlike a prompt's own quantile or maximum, neither grows with the number of its tokens.
    """

    signed: bool = False
    quantile: float = 0.0


def differences(run: Sequence[ScoreRecord]) -> dict[tuple[int | None, str], Prompts]:
    """Each gap's differences by step and pair.

    A prompt is what a group's first call was asked: groups that were asked the same are one.
    """
    found: dict[tuple[int | None, str], dict[object, list[Array]]] = {}
    for record in run:
        pairs = compared_columns(record.info.columns)
        asked: dict[str, tuple[int, object]] = {}
        taken: list[tuple[str, str, Array]] = []
        for call in record:
            if call.group not in asked or call.turn < asked[call.group][0]:
                prompt = call.prompt.tobytes(), *sorted(call.context.items())
                asked[call.group] = call.turn, prompt
            for first, second in pairs:
                difference = (call.scores[first] - call.scores[second])[call.mask]
                difference = difference[np.isfinite(difference)]
                if len(difference):
                    taken.append((f"{first}-{second}", call.group, difference))
        for pair, group, difference in taken:
            prompts = found.setdefault((record.info.step, pair), {})
            prompts.setdefault(asked[group][1], []).append(difference)
    return {
        key: {prompt: np.concatenate(parts) for prompt, parts in prompts.items()}
        for key, prompts in found.items()
    }


def chance_of_mean(run: Prompts, control: Prompts, measure: Measure) -> Chance:
    """Chance of the run's mean over prompts lying so far above the control's, or off it if signed.

    Welch's t over prompts, or Student's over their differences where both runs have the same. A
    few prompts may seem more alike than prompts are. So it is assumed that they spread by half of
    the mean of both runs (for the signed mean, of the MAE), which counts for as much as 4 prompts
    more would tell; a share spreads by its count's Poisson noise at least; and the difference
    spreads no less than with the spread of both runs together in each. Prompts are taken to be
    independent, and their means near enough to normal.
    """
    if min(len(run), len(control)) < FEWEST:
        return Chance(1.0, 1.0)
    sizes = [{prompt: np.abs(d) for prompt, d in one.items()} for one in (run, control)]
    floors = [0.0, 0.0]
    if measure.quantile:
        everything = np.concatenate([d for one in sizes for d in one.values()])
        level = np.quantile(everything, measure.quantile)
        sizes = [{p: (d > level).astype(np.float64) for p, d in one.items()} for one in sizes]
    means = [_means(one) for one in sizes]
    middle = float(means[0].mean() + means[1].mean()) / 2
    if not middle:
        return Chance(1.0, 0.0)
    if measure.quantile:
        floors = [middle * float(np.mean([1 / len(d) for d in one.values()])) for one in sizes]
    if measure.signed:
        means = [_means(run), _means(control)]
    prior = (_SPREAD * middle) ** 2
    if run.keys() == control.keys():
        place = {prompt: number for number, prompt in enumerate(control)}
        means = [means[0] - means[1][[place[prompt] for prompt in run]]]
        samples = [_Sample(len(run), _squares(means[0]), prior, 2 * _WEIGHT, sum(floors))]
        apart = float(means[0].mean())
    else:
        samples = [
            _Sample(len(one), _squares(one), prior, _WEIGHT, floor)
            for one, floor in zip(means, floors, strict=True)
        ]
        apart = float(means[0].mean() - means[1].mean())
    sides = 1 if measure.signed else 2
    still = [_Sample(s.prompts, 0.0, s.prior, s.weight, s.floor) for s in samples]
    return Chance(
        _tail(abs(apart) if measure.signed else apart, samples) / sides,
        _tail(2 * middle, still) / sides,
    )


def outliers(run: Prompts, control: Prompts) -> tuple[int, Chance]:
    """Prompts of the run with a token beyond the control's largest, and their chance.

    Where prompts are alike, the largest token of all is as likely any prompt's, or any token's: the
    larger of both. The prompt with the next is drawn from the others, and so on.
    """
    largest = max(float(np.abs(d).max()) for d in control.values())
    peaks = sorted(((float(np.abs(d).max()), len(d)) for d in run.values()), reverse=True)
    others = sum(map(len, control.values()))

    def chance(count: int) -> float:
        found, tokens = 1.0, sum(map(len, run.values()))
        for number, (_, size) in enumerate(peaks[:count]):
            prompts = len(run) - number
            found *= max(tokens / (tokens + others), prompts / (prompts + len(control)))
            tokens -= size
        return found

    beyond = sum(peak > largest for peak, _ in peaks)
    return beyond, Chance(chance(beyond), chance(len(run)))


@dataclass(frozen=True, slots=True)
class _Sample:
    """Independent values: how many, their squares about their mean, and what is assumed of them."""

    prompts: int
    squares: float
    prior: float
    weight: int
    floor: float

    @property
    def freedom(self) -> int:
        return self.weight + self.prompts - 1

    @property
    def total(self) -> float:
        return self.weight * self.prior + self.squares


def _tail(apart: float, samples: Sequence[_Sample]) -> float:
    """Chance that means are ``apart`` or more either way."""
    together = sum(s.total for s in samples) / sum(s.freedom for s in samples)
    own = [max(s.total / s.freedom, s.floor) / s.prompts for s in samples]
    pooled = [max(together, s.floor) / s.prompts for s in samples]
    freedom = sum(own) ** 2 / sum(v * v / s.freedom for v, s in zip(own, samples, strict=True))
    return t_tail(apart / math.sqrt(max(sum(own), sum(pooled))), freedom)


def _means(prompts: Prompts) -> Array:
    return np.array([d.mean() for d in prompts.values()])


def _squares(values: Array) -> float:
    return float(((values - values.mean()) ** 2).sum())
