"""Values that computed scores don't take: those of a coarse number format, and fill."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.tokens import Tokens, binomial_tail, explained, letter, mae

Array = NDArray[np.float64]

ON_GRID = 0.99
OFF_GRID = 0.5

APART = 0.05
"""A fill value stands so far (nat) from the other column's score, and clear of the noise."""

ZERO = 2.0**-20
"""Chance that a computed score is exactly 0 where the other column's is not near it: float32
log-probs there are multiples of 2^-20 or so."""

MEET = 2.0**-16
"""The same for any other value."""


def _to_bfloat16(values: Array) -> Array:
    """Round to the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def _to_float16(values: Array) -> Array:
    limit = float(np.finfo(np.float16).max)
    return np.clip(values, -limit, limit).astype(np.float16).astype(np.float64)


GRIDS = {
    # bits of a float32 mantissa that the format lacks
    "bfloat16": (_to_bfloat16, 16),
    "float16": (_to_float16, 13),
}


def rounded(sample: PairSample) -> Finding | None:
    """Find scores that were rounded to bfloat16 or float16 where the other column's were not."""
    tokens = Tokens.of(sample)
    if tokens is None:
        return None
    columns = ((sample.first_name, tokens.first), (sample.second_name, tokens.second))
    for name, (to_grid, bits) in GRIDS.items():
        for (column, scores), (other, fine) in (columns, columns[::-1]):
            # zeros and fill are on every grid
            values = np.unique(scores[scores != 0])
            on = to_grid(values) == values
            off = float((to_grid(fine) == fine).mean())
            if len(values) < 16 or on.mean() < ON_GRID or off > OFF_GRID:
                continue
            half = np.abs(scores) * 2.0 ** -(24 - bits)
            rest = scores - to_grid(fine)
            chance = 4 * binomial_tail(int(on.sum()), len(on), 2.0**-bits)
            return Finding(
                test="bf16-rounded scores" if name == "bfloat16" else "fp16-rounded scores",
                pair=sample.name,
                side=letter(column),
                summary=f"{column} was rounded to {name}, which moves it by up to "
                f"{half.max():.4f} nat, by {half.mean() / 2:.5f} in the mean",
                evidence=(
                    f"{on.mean():.2%} of {column}'s {len(on)} distinct scores are {name} numbers, "
                    f"and {off:.2%} of {other}'s",
                    f"{(np.abs(tokens.difference) <= half).mean():.1%} of the differences are "
                    "within half a unit in the last place",
                    f"with {other} rounded as well, {mae(tokens.difference):.6f} nat become "
                    f"{mae(rest):.6f}",
                ),
                false_alarm=min(1.0, chance),
                explains=explained(tokens.difference, rest),
                tokens=len(tokens),
                mae=mae(tokens.difference),
            )
    return None


def filled(sample: PairSample) -> Finding | None:
    """Find one value that stands in place of scores: zeros of padding, or another fill."""
    tokens = Tokens.of(sample)
    if tokens is None:
        return None
    found = [
        _filled(sample, tokens, sample.first_name, tokens.first, tokens.second),
        _filled(sample, tokens, sample.second_name, tokens.second, tokens.first),
    ]
    good = [finding for finding in found if finding is not None]
    return min(good, key=lambda finding: finding.false_alarm, default=None)


def _filled(
    sample: PairSample, tokens: Tokens, column: str, scores: Array, other: Array
) -> Finding | None:
    away = np.abs(scores - other) > APART
    values, counts = np.unique(scores[away], return_counts=True)
    if not len(values):
        return None
    zero = bool((values == 0).any())
    value = 0.0 if zero else float(values[counts.argmax()])
    equal = scores == value
    kept = equal & away
    # the same tokens after the same prompt have equal scores on both sides: they count once
    hits = len(np.unique(np.round(other[kept], 2)))
    # scores on a coarse grid meet often, but then near to the other column's
    if hits < 2 or (not zero and hits < 0.5 * int(equal.sum())):
        return None
    where, said = _place(tokens, equal)
    # filters leave zeros too, where one token keeps all of the mass, but never far from 0
    if zero and not where and float(other[kept].min()) > -1.0:
        return None
    apart = np.abs(scores - other)
    rest = apart[~kept] if not kept.all() else np.zeros(1)
    usual = float(np.quantile(rest, 0.99))
    # what another value repeats by chance, as it does on a coarse grid, this one may as well
    common = int(counts[values != value].max(initial=0)) / len(tokens)
    if not zero and hits < 4 * common * len(tokens):
        return None
    rate = ZERO if zero else max(MEET, common)
    tries = 2 if zero else 2 * len(tokens)
    wanted = hits if zero else hits - 1
    logs = math.lgamma(len(tokens) + 1) - math.lgamma(wanted + 1)
    logs += wanted * math.log(rate) - math.lgamma(len(tokens) - wanted + 1)
    chance = min(1.0, tries * math.exp(min(logs, 0.0)))
    if chance > 1e-3:
        return None
    return Finding(
        test="padding filled with zeros" if value == 0 else "padding filled with a value",
        pair=sample.name,
        side=letter(column),
        summary=f"{column} is exactly {value:g} on {int(kept.sum())} tokens where "
        f"{sample.second_name if column == sample.first_name else sample.first_name} is "
        f"{np.median(other[kept]):.3f} in the median" + (f": {where}" if where else ""),
        evidence=(
            *said,
            f"these tokens differ by {np.median(apart[kept]):.4f} nat in the median, and 99 % of "
            f"the others by less than {usual:.4f}",
        ),
        false_alarm=chance,
        explains=explained(tokens.difference, np.where(kept, 0.0, tokens.difference)),
        tokens=int(kept.sum()),
        mae=mae(tokens.difference[kept]),
        where=where or f"scores of exactly {value:g}",
    )


def _place(tokens: Tokens, kept: NDArray[np.bool_]) -> tuple[str, tuple[str, ...]]:
    """Where filled tokens stand, if that is at the ends of responses, and a sentence."""
    calls = np.unique(tokens.call[kept])
    here = np.isin(tokens.call, calls)
    for side, edge in (("last", tokens.left), ("first", tokens.index)):
        depth = np.zeros(int(tokens.call.max()) + 1, np.int64)
        np.maximum.at(depth, tokens.call[kept], edge[kept] + 1)
        inside = here & (edge < depth[tokens.call])
        if kept[inside].mean() >= 0.95:
            many = np.median(depth[calls])
            said = f"the {side} {many:g} tokens of {len(calls)} responses"
            if len(set(depth[calls].tolist())) > 1:
                said = f"the {side} {depth[calls].min()} to {depth[calls].max()} tokens of "
                said += f"{len(calls)} responses"
            return said, (f"they stand together: {said}",)
    return "", (f"they stand in {len(calls)} responses, at neither end",)
