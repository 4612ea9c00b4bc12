"""Scores that were rounded to a coarse number format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.tokens import (
    Array,
    Flags,
    Tokens,
    binomial_tail,
    explained,
    letter,
    mae,
)

ON_GRID = 0.99
OFF_GRID = 0.5


def _to_bfloat16(values: Array) -> Array:
    """Round to the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def _to_float16(values: Array) -> Array:
    limit = float(np.finfo(np.float16).max)
    return np.clip(values, -limit, limit).astype(np.float16).astype(np.float64)


@dataclass(frozen=True, slots=True)
class _Grid:
    """A coarse format: how it rounds, how near (of a score's size) float32 holds its numbers, and
    an upper bound of the chance that a fine score is so near to one of them."""

    test: str
    name: str
    to_grid: Callable[[Array], Array]
    near: float
    chance: float

    def holds(self, values: Array) -> Flags:
        """Whether each value, [value], is on the grid."""
        held: Flags = np.abs(self.to_grid(values) - values) <= self.near * np.abs(values)
        return held


def _decimals(count: int) -> _Grid:
    return _Grid(
        f"scores rounded to {count} decimal{'s' * (count > 1)}",
        f"{count} decimal{'s' * (count > 1)}",
        lambda values: np.round(values, count),
        2.0**-22,
        # 2 x 2^-22 x 10^3 for scores up to 30 nat
        2.0**-6,
    )


DECIMALS = (_decimals(1), _decimals(2), _decimals(3))
GRIDS = (
    # the formats lack so many bits of a float32 mantissa
    _Grid("bf16-rounded scores", "bfloat16", _to_bfloat16, 0.0, 2.0**-16),
    _Grid("fp16-rounded scores", "float16", _to_float16, 0.0, 2.0**-13),
    *DECIMALS,
)


def distinct(scores: Array, grid: _Grid) -> Flags | None:
    """Which distinct scores a grid holds, where it holds nearly all; zeros are on every grid."""
    values = np.unique(scores[scores != 0])
    on = grid.holds(values)
    return on if len(values) >= 16 and on.mean() >= ON_GRID else None


def rounded(sample: PairSample) -> Finding | None:
    """Find scores that were rounded to 16 bits or a few decimals where the other's were not."""
    tokens = Tokens.of(sample)
    if tokens is None:
        return None
    columns = ((sample.first_name, tokens.first), (sample.second_name, tokens.second))
    for grid in GRIDS:
        for (column, scores), (other, fine) in (columns, columns[::-1]):
            on = distinct(scores, grid)
            others = fine[fine != 0]
            off = float(grid.holds(others).mean()) if len(others) else 1.0
            if on is None or off > OFF_GRID:
                continue
            moved = np.abs(grid.to_grid(fine) - fine)
            rest = scores - grid.to_grid(fine)
            chance = 2 * len(GRIDS) * binomial_tail(int(on.sum()), len(on), grid.chance)
            return Finding(
                test=grid.test,
                pair=sample.name,
                side=letter(column),
                summary=f"{column} was rounded to {grid.name}, which moves such scores by up to "
                f"{moved.max():.4f} nat, by {moved.mean():.5f} in the mean",
                evidence=(
                    f"{on.mean():.2%} of {column}'s {len(on)} distinct scores are numbers of "
                    f"{grid.name}, and {off:.2%} of {other}'s",
                    f"{(rest == 0).mean():.1%} of {other}'s scores become {column}'s when rounded",
                    f"with {other} rounded as well, {mae(tokens.difference):.6f} nat become "
                    f"{mae(rest):.6f}",
                ),
                false_alarm=min(1.0, chance),
                explains=explained(tokens.difference, rest),
                tokens=len(tokens),
                mae=mae(tokens.difference),
            )
    return None
